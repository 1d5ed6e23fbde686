"""`convert upcycle` copies the experts of a MoE model, and the new model gives nearly the old outputs."""

import pytest
import torch
from moe_files import D, E, load, outputs, save
from tool_in_process import refusal, tool

# With this gate spread, nearly no token chooses two copies of the same expert.
SURE = ("--gate-spread", 300, "--expert-noise", 0)
CASES = {
    "top-2": {},
    "top-1": {"top_k": 1},
    "not normalized": {"top_k": 3, "normalize_gate": "none"},
    "biased": {"gate_type": "biased"},
    "two gates": {"gate_type": "linear,biased", "gate_index": 1},
    "groups of experts": {"expert_groups": 2, "groups_per_token": 1},
    "balance bias": {"balance_bias": True},
    "glu": {"expert_type": "glu"},
    "shared and residual": {"shared_experts": 1, "residual": True},
}


@pytest.fixture
def added(tmp_path):
    """Return a function that saves and upcycles a model, and returns both files and the printed text."""

    def run(*words, **options):
        before, after = save(tmp_path / "a.pt", **options), tmp_path / "b.pt"
        return before, after, tool("convert", "upcycle", before, "--output", after, *words)

    return run


@pytest.mark.parametrize("count", ["8", "8,12"])
@pytest.mark.parametrize("case", CASES)
def test_copies_of_experts_give_the_outputs_of_the_old_model(case, count, added):
    before, after, text = added("--moe-expert-count", count, *SURE, **CASES[case])
    assert f"4 -> {count} experts" in text and load(after)["cfg"]["model"]["moe_expert_count"] == count
    x = torch.randn(200, D, generator=torch.Generator().manual_seed(4))
    for label, expected in outputs(before, x).items():
        same = torch.isclose(outputs(after, x)[label], expected, rtol=1e-3, atol=1e-3).all(dim=1)
        assert same.float().mean() > 0.95
    assert "last_optimizer_state" not in load(after)


def test_noise_changes_all_copies_of_an_expert_except_the_first(added):
    before, after, _ = added("--moe-expert-count", 12, "--expert-noise", 0.1)
    name = "decoder.layers.0.fc1.experts.fc1_weight"
    old, new = load(before)["model"][name], load(after)["model"][name]
    for i in range(E):
        assert torch.equal(new[3 * i], old[i])
        for copy in new[3 * i + 1 : 3 * i + 3]:
            difference = (copy - old[i]).square().mean().sqrt() / old[i].square().mean().sqrt()
            assert 0.05 < float(difference) < 0.2
    assert not torch.equal(new[1], new[2])


@pytest.mark.parametrize(
    ("words", "options", "sentence"),
    [
        ((), {}, "INPUT has experts already"),
        (("--moe-expert-count", 6), {}, "--moe-expert-count is 6 for decoder_0, which has 4 experts"),
        (("--moe-expert-count", 8, "--moe-top-k", 1), {}, "INPUT has experts already"),
        (("--moe-expert-count", 8, "--gate-scale", 2), {}, "INPUT has experts already"),
        (("--moe-expert-count", 8), {"gate_type": "cosine"}, "routes with cosine"),
        (("--moe-expert-count", 8), {"score_function": "sigmoid"}, "routes with sigmoid"),
        (("--moe-expert-count", 8), {"choice": "experts"}, "routes with experts"),
    ],
)
def test_convert_upcycle_rejects_unsupported_moe_models_and_options(words, options, sentence, tmp_path):
    path = save(tmp_path / "a.pt", **options)
    assert sentence in refusal("upcycle", path, "--output", tmp_path / "b.pt", *words)
