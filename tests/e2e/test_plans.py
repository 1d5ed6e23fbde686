"""Training with collective plans gives the same bits as training with sums in the order of ranks."""

import json
from pathlib import Path

import pytest
import torch
from cli import fairseq
from equality import facts_of, same_bits, same_weights
from models import lm_args
from tool_in_process import tool

from fairseq_tutel.plans.format import to_json
from fairseq_tutel.plans.generators import make

FIXED = str(Path(__file__).parent / "fixed_order_user_dir")
UPDATES = 3
# The generator and the collective of each plan. These plans add tensors in the order of ranks.
IN_ORDER = (("one_phase", "reduce_scatter"), ("one_phase", "all_gather"), ("two_phase", "all_reduce"))


def write(folder, ranks):
    """Write the plans of `IN_ORDER` for each number of `ranks`, and an all-to-all plan for two ranks."""
    folder.mkdir(exist_ok=True)
    plans = [make(name, collective, n) for name, collective in IN_ORDER for n in ranks]
    for plan in (*plans, make("two_hops", "all_to_all", 2, nodes=2)):
        name = plan.name.replace(" ", "_")
        (folder / f"{name}_{plan.ranks}.json").write_text(json.dumps(to_json(plan)))
    return folder


def train(data, folder, *flags, ranks):
    flags = ("--update-freq", 4 // ranks, "--moe-expert-parallel-size", 2, *flags)
    return fairseq("train", *lm_args(data, folder, *flags, updates=UPDATES), ranks=ranks)


def loaded(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


CASES = [
    pytest.param(2, (), id="usual on 2"),
    pytest.param(4, ("--moe-zero-stage", 2), id="zero 2 on 4", marks=pytest.mark.long),
]


@pytest.mark.parametrize("ranks, flags", CASES)
def test_training_with_collective_plans_adds_gradients_in_rank_order(ranks, flags, lm_data, tmp_path):
    folder, rows = tmp_path / "files", "two_hops" if flags else "linear"
    if flags:
        write(folder, (2, ranks))
    else:  # the default plans for two ranks add in the order of ranks
        tool("plans", ranks, "--output", folder)
    by_plans = ("--moe-collective-plans", folder, "--moe-a2a-algorithm", f"plan:{rows}_all_to_all_2")
    run = train(lm_data, tmp_path / "plans", *flags, *by_plans, ranks=ranks)
    train(lm_data, tmp_path / "fixed", *flags, "--user-dir", FIXED, ranks=ranks)
    got, fixed = loaded(tmp_path / "plans"), loaded(tmp_path / "fixed")
    same_bits(fixed["model"], got["model"])
    same_bits(fixed["last_optimizer_state"]["state"], got["last_optimizer_state"]["state"])
    if ranks > 2:  # with two ranks, every order gives the same sum
        train(lm_data, tmp_path / "torch", *flags, ranks=ranks)
        plain = loaded(tmp_path / "torch")
        assert facts_of(got) == pytest.approx(facts_of(plain), rel=1e-6, abs=1e-7)
        same_weights(plain["model"], got["model"], adam=True)
    said = [f"the exchange of rows uses the collective plan {rows}_all_to_all_2 (digest "]
    if flags:
        said += [f"reduce-scatter of gradients uses the collective plan one_phase_reduce_scatter_{ranks} "]
        said += [f"all-gather of updated weights uses the collective plan one_phase_all_gather_{ranks} "]
    else:
        said += [
            f"the all-reduce of dense gradients uses the collective plan one_phase_all_reduce_{ranks} "
        ]
    for sentence in said:
        assert run.output.count(sentence) == 1, sentence
