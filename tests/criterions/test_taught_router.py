"""--cmcl-teach-router against experts by hand: which expert wins, and that only the gate learns it."""

import argparse

import pytest
import torch
import torch.nn.functional as F
from fairseq import models
from fairseq.data import Dictionary
from fairseq.logging import metrics

from fairseq_tutel.criterions.cmcl import CMCLCriterion
from fairseq_tutel.criterions.taught_router import forward_with_router_loss
from fairseq_tutel.ensemble.options import CMCLConfig
from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.feed_forward import moe_layers

register()
E, PAD = 4, 1


def built(**options):
    words = Dictionary()
    for i in range(20):
        words.add_symbol(f"w{i}")
    names = ("dictionary", "source_dictionary", "target_dictionary")
    task = argparse.Namespace(cfg=argparse.Namespace(), **dict.fromkeys(names, words))
    args = argparse.Namespace(
        arch="moe_transformer_lm", decoder_layers=2, decoder_embed_dim=16, decoder_input_dim=16,
        decoder_output_dim=16, decoder_ffn_embed_dim=32, decoder_attention_heads=2, dropout=0.3,
        attention_dropout=0.1, tokens_per_sample=16, max_target_positions=16, add_bos_token=False,
        moe_freq=1, moe_expert_count=str(E), **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return models.build_model(args, task), task


def sample_of():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 20, (3, 7), generator=generator)
    tokens[1, 4:] = PAD
    target = torch.randint(4, 20, (3, 7), generator=generator).masked_fill(tokens == PAD, PAD)
    inputs = {"src_tokens": tokens, "src_lengths": torch.tensor([7, 4, 7])}
    return {"net_input": inputs, "target": target, "ntokens": int((target != PAD).sum())}


def losses_by_hand(model, sample, seed):
    """Every token's loss with each expert alone, whose network stands in the layer's place."""
    layer, found = moe_layers(model)[-1], []

    def alone(expert):
        def hook(module, args, y):
            x = args[0]
            weights = module.route(x.reshape(-1, 16), seen[-1]).weights_TK.sum(dim=1)
            weights = torch.where(weights == 0, 1.0, weights).view(*x.shape[:2], 1)
            h = F.relu(x @ module.experts.fc1_weight[expert].T + module.experts.fc1_bias[expert])
            out = h @ module.experts.fc2_weight[expert].T + module.experts.fc2_bias[expert]
            return weights * out

        return hook

    seen = []
    own = layer.routing_of
    layer.routing_of = lambda x_TD, call: seen.append(call) or own(x_TD, call)
    for expert in range(E):
        handle = layer.register_forward_hook(alone(expert))
        torch.manual_seed(seed)
        with torch.no_grad():
            logs = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)
        handle.remove()
        found.append(-logs.gather(-1, sample["target"][..., None]).squeeze(-1))
    del layer.routing_of
    return torch.stack(found)


@pytest.mark.parametrize("options", ({"moe_top_k": 2}, {"moe_top_k": 1, "moe_capacity_factor": 0.5}))
def test_the_gate_learns_who_won_and_nothing_else_changes(options):
    model, _ = built(**options)
    model.train()
    sample, layer = sample_of(), moe_layers(model)[-1]
    counts = sample["target"] != PAD
    inputs = []
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    torch.manual_seed(5)
    plain = model(**sample["net_input"])[0]
    expected_state, tally = torch.get_rng_state(), layer.record.tally.assigned_KE
    handle.remove()

    torch.manual_seed(5)
    (output, _), loss, right = forward_with_router_loss(model, sample, counts.reshape(-1))
    assert torch.equal(output, plain)
    assert torch.equal(torch.get_rng_state(), expected_state)
    assert torch.equal(layer.record.tally.assigned_KE, tally)
    assert layer.router is None

    winner = losses_by_hand(model, sample, 5).argmin(dim=0)
    assert len(winner[counts].unique()) > 1
    logits = layer.gate(inputs[0].transpose(0, 1)[counts])
    torch.testing.assert_close(loss, F.cross_entropy(logits, winner[counts], reduction="sum"))
    assert right == (logits.argmax(dim=1) == winner[counts]).sum()
    loss.backward()
    learned = [name for name, p in model.named_parameters() if p.grad is not None]
    assert learned == ["decoder.layers.1.fc1.gate.weight"]


def test_the_criterion_adds_it_in_training_alone():
    model, task = built()
    sample = sample_of()
    plain = CMCLCriterion(task, CMCLConfig(cmcl_teach_router=0.25))
    torch.manual_seed(5)
    loss, size, log = plain(model.train(), sample)
    torch.testing.assert_close(loss, log["nll_loss"] + 0.25 * log["router_loss"])
    assert size == sample["ntokens"] and log["router_loss"] > 0
    with metrics.aggregate() as found:
        plain.reduce_metrics([log])
    assert 0 <= found.get_smoothed_values()["router_accuracy"] <= 100
    evaluated, _, log = plain(model.eval(), sample)
    torch.testing.assert_close(evaluated, log["nll_loss"])
    assert "router_loss" not in log


@pytest.mark.parametrize(
    "options, words",
    (
        ({"moe_gate_type": "hash"}, "a hash gate has no parameters; remove the flag"),
        ({"moe_pregate": 1}, "a pre-gated layer's gate reads the input of another layer"),
    ),
)
def test_who_cannot_learn(options, words):
    model, _ = built(**options)
    sample = sample_of()
    with pytest.raises(ValueError, match=words):
        forward_with_router_loss(model.train(), sample, (sample["target"] != PAD).reshape(-1))
