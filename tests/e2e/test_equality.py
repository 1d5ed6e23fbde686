"""A training run gives equal numbers on 1 rank and on 4 ranks, through fairseq-train.

The micro-batches are equal (ranks x --update-freq = 4), in float32. Loss, gradient norm, clipping, balance
loss and expert metrics agree to a relative error of 1e-5; weights agree to 1e-5 with moe_sgd.
"""

import pytest
from equality import assert_ranks_agree

SGD = ("--optimizer", "moe_sgd", "--momentum", 0.9, "--lr", 0.5)
CASES = {
    # The four ranks form two nodes.
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
def test_ranks_train_the_same_model(case, request, tmp_path):
    kind, *extra = CASES[case]
    data = request.getfixturevalue(f"{kind}_data")
    assert_ranks_agree(kind, data, extra, tmp_path)
