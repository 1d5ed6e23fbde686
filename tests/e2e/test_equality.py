"""fp32 training through fairseq-train gives almost equal metrics and weights on 1 rank and on 4 ranks.

The micro-batches are the same: --update-freq is 4 on 1 rank, and 1 on 4 ranks.
"""

import pytest
from equality import assert_ranks_agree

SGD = ("--optimizer", "moe_sgd", "--momentum", 0.9, "--lr", 0.5)
CASES = {
    # --moe-local-size 2 divides the four ranks into two nodes.
    "dropless-top1-2dh": (
        "lm", *SGD, "--moe-top-k", 1, "--moe-use-2dh", "--moe-local-size", 2, "--moe-recompute-experts",
        "--moe-cmr", "--cmr-gate-loss-wt", 0.5, "--cmr-gate-loss-p", 0.2,
    ),
    "experts-choose-residual-prescore": (
        "mt", *SGD, "--moe-choice", "experts", "--moe-residual", "--moe-prescore",
        "--moe-normalize-gate", "after", "--moe-pregate", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_four_ranks_train_the_same_model_as_one_rank(case, request, tmp_path):
    kind, *extra = CASES[case]
    data = request.getfixturevalue(f"{kind}_data")
    assert_ranks_agree(kind, data, extra, tmp_path)
