"""What the log says of a model when it is built."""

import pytest
from torch import nn

import fairseq_tutel as ft
from fairseq_tutel import plugin
from fairseq_tutel.moe.option_table import ModelConfig, SidesConfig, StoreConfig, TaskConfig
from fairseq_tutel.plugin.announce import (
    Facts,
    log_size,
    sizes,
    warn_of_no_effect,
)

plugin.register()
D, H, E, K, V = 4, 6, 8, 2, 10


def test_a_token_meets_its_own_experts_and_all_else_and_tied_weights_count_once():
    model = nn.Module()
    model.embedding = nn.Embedding(V, D)
    model.moe = ft.MoELayer(ft.MoEConfig(D, H, E, top_k=K, shared_experts=1))
    model.output = nn.Linear(D, V, bias=False)
    model.output.weight = model.embedding.weight
    matrices, expert, gate = 2 * D * H, 2 * D * H + D + H, D * E
    total, active, flops, experts = sizes(model)
    assert total == sum(p.numel() for p in model.parameters()) == V * D + (E + 1) * expert + gate
    assert active == V * D + (K + 1) * expert + gate
    assert experts == E * expert
    assert flops == 2 * (V * D + (K + 1) * matrices + gate)


def test_the_log_has_the_number_of_parameters_of_all_ranks(caplog):
    model = nn.Sequential(ft.MoELayer(ft.MoEConfig(D, H, E)), nn.Linear(D, V))
    with caplog.at_level("INFO", "fairseq_tutel"):
        log_size(model)
    experts, total = (sum(p.numel() for p in m.parameters()) for m in (model[0].experts, model))
    assert f"parameters on all ranks: {total:,}, of experts: {experts:,}, active per tok" in caplog.text


# Two nodes of two ranks that exchange tokens; an expert has two slices.
ACROSS = {"ranks": 4, "expert_parallel_size": 4, "slices": 2, "over_nodes": True, "gpu": True,
          "opened": True}  # fmt: skip
STORED, CACHED = StoreConfig("on-demand"), StoreConfig("on-demand", moe_expert_cache="8")
ALL_HERE = "every rank has all experts"
TUNER = "the tuner chooses"
# The option, by its field of a MoEConfig or its key; the facts by which it is idle; why.
IDLE = [
    ({"exchange": "padded"}, {"expert_parallel_size": 1}, f"-exchange padded has no effect: {ALL_HERE}"),
    ({"exchange": "padded"}, {"adaptive_r": 0}, "has no effect: adaptive_r is 0, so no rows are sent"),
    ({"a2a_dtype": "bf16"}, {"half": True}, "rows are already in half precision"),
    ({"a2a_dtype": "bf16"}, {"expert_parallel_size": 1}, ALL_HERE),
    ({"a2a_ffn_overlap_degree": 2}, {"adaptive_r": 0}, "adaptive_r is 0, so no rows are sent"),
    ({"a2a_algorithm": "2dh"}, {"over_nodes": False, "ranks_per_node": 3}, "span several complete nodes"),
    ({"a2a_algorithm": "auto"}, {"adaptive_r": 0}, "adaptive_r is 0, so no rows are sent"),
    ({"adaptive_r": 2}, {"slices": 1}, "the number of ranks per expert is 1, so 1 is used"),
    ({"adaptive_r": 2}, {"tuned": True}, TUNER),
    ({"parallel_type": "model"}, {"tuned": True}, TUNER),
    ({"adaptive": "auto"}, {"expert_parallel_size": 1}, ALL_HERE),
    ({"expert_grad_norm": "sqrt_world_size"}, {"ranks": 1}, "has no effect: the run has only one rank"),
    ({"moe_zero_stage": 1}, {"ranks": 1}, "--moe-zero-stage 1 has no effect: the run has only one rank"),
    ({"record_a2a_perf_stats": True}, {"expert_parallel_size": 1}, ALL_HERE),
    ({"moe_adaptive_window": 4}, {"tuned": False}, "4 has no effect without --moe-adaptive auto"),
    ({"moe_adaptive_file": "x"}, {"tuned": False}, "without --moe-adaptive auto"),
    ({"moe_expert_tier": "disk"}, {"store": StoreConfig()}, "no effect without --moe-expert-store"),
    ({"moe_expert_cache": "8"}, {"store": StoreConfig()}, "8 has no effect without --moe-expert-store"),
    ({"moe_expert_cache_policy": "lru"}, {"store": STORED}, "has no effect without --moe-expert-cache"),
    ({"moe_inference_dtype": "bf16"}, {"opened": False}, "the model is not opened for inference"),
    ({"moe_freq": 1}, {"sides": SidesConfig(1, 1)}, "--encoder-moe-freq and --decoder-moe-freq are given"),
]  # fmt: skip


OWNERS = (ModelConfig, TaskConfig, StoreConfig)


def said_of(caplog, given, facts):
    """Return what is said of one option at this value, by these facts."""
    caplog.clear()
    layer = {key: value for key, value in given.items() if key in ft.MoEConfig.__dataclass_fields__}
    around = [kind for kind in OWNERS if given.keys() <= vars(kind()).keys()]
    config = ft.MoEConfig(D, H, E, **layer)
    facts = {"layer": config, "sides": SidesConfig(), "store": CACHED, **ACROSS, **facts}
    for each in (config, *(kind(**given) for kind in around)):
        warn_of_no_effect(each, Facts(**facts))
    return caplog.text


@pytest.mark.parametrize("given, facts, said", IDLE, ids=str)
def test_an_option_without_effect_is_named_with_the_reason(caplog, given, facts, said):
    assert said in said_of(caplog, given, facts)
    opposite = {"tuned": True} if facts == {"tuned": False} else {}
    assert said_of(caplog, given, opposite) == ""


def test_r_by_its_own_option_goes_before_that_of_a_type(caplog):
    both = {"parallel_type": "model", "adaptive_r": 2}
    assert "--moe-parallel-type model has no effect: --moe-adaptive-r is given" in said_of(caplog, both, {})


@pytest.mark.parametrize("given", [{"moe_local_size": 2}, {"moe_machine_file": "x"}])
def test_what_a_hierarchical_exchange_alone_reads_needs_one(caplog, given):
    assert "has no effect without --moe-a2a-algorithm" in said_of(caplog, given, {})
