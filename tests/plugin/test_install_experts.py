"""Builds MoE variants of fairseq's models in one process."""

import argparse
import re

import pytest
import torch
from fairseq import models, options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.transformer_lm import TransformerLanguageModel

from fairseq_tutel.parallel import guard
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.feed_forward import moe_layers
from fairseq_tutel.plugin.install import _sentence_length
from fairseq_tutel.plugin.run_state import OPENED
from fairseq_tutel.plugin.training.startup import refuse_run

register()

SMALL = {
    "decoder": [
        "--task", "moe_language_modeling", "--arch", "moe_transformer_lm", "--decoder-layers", "4",
        "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2",
    ],
    "encoder": ["--task", "moe_translation", "--arch", "moe_transformer_tiny", "--encoder-layers", "4"],
}  # fmt: skip


def configuration(side, *words, **overrides):
    """Return the FairseqConfig of a small model's command line, with overrides."""
    words = ["data", *SMALL[side], "--moe-freq", "2", "--moe-expert-count", "3", *words]
    arguments = options.parse_args_and_arch(options.get_training_parser(), words)
    vars(arguments).update(overrides)
    return convert_namespace_to_omegaconf(arguments)


def task_of_words():
    """Return a task with the dictionaries that a model reads."""
    task = argparse.Namespace(cfg=argparse.Namespace())
    task.source_dictionary = task.target_dictionary = Dictionary()
    return task


def build(side, **overrides):
    """Return a model with experts in every second layer, and the model's configuration.

    `side` is "encoder" for a translation model, or "decoder" for a language model.
    """
    cfg = configuration(side, **overrides).model
    return models.build_model(cfg, task_of_words()), cfg


def test_a_model_for_inference_uses_the_checkpoint_s_tensors_as_experts(monkeypatch):
    saved, cfg = build("decoder")
    state, tokens = saved.state_dict(), torch.tensor([[0, 1, 2, 3]])
    halved = next(key for key in state if key.endswith("experts.fc2_weight"))
    state[halved] = state[halved].half()
    monkeypatch.setattr("fairseq_tutel.moe.experts.draw_linear", None)
    cfg._set_flag(OPENED, True)
    opened = models.build_model(cfg, task_of_words())
    mine = {key: p for key, p in opened.named_parameters() if ".experts." in key}
    assert mine and all(p.is_meta for p in mine.values())
    opened.load_state_dict(state, model_cfg=cfg)
    mine = {key: p for key, p in opened.named_parameters() if ".experts." in key}
    at = {key for key, p in mine.items() if p.data_ptr() == state[key].data_ptr()}
    assert at == mine.keys() - {halved} and mine[halved].dtype == torch.float32
    saved.load_state_dict(state, model_cfg=cfg)
    assert torch.equal(opened.eval()(tokens)[0], saved.eval()(tokens)[0])


@pytest.mark.parametrize("side", SMALL)
@pytest.mark.parametrize(("kept", "with_experts"), [("1,3", [0, 1]), ("0,2,3", [2])])
def test_a_pruned_model_loads_the_weights_of_the_kept_layers(side, kept, with_experts):
    whole, _ = build(side)
    # Without --decoder-layers-to-keep, fairseq would drop all decoder layers.
    keep = {"decoder_layers_to_keep": "0,1", f"{side}_layers_to_keep": kept}
    pruned, cfg = build(side, **keep)
    labels = [layer.label for layer in moe_layers(pruned) if layer.label.startswith(side)]
    assert labels == [f"{side}_{i}" for i in with_experts]
    pruned.load_state_dict(whole.state_dict(), model_cfg=cfg)
    last = max(map(int, kept.split(",")))
    own = getattr(pruned, side).layers[-1].state_dict()
    for name, tensor in getattr(whole, side).layers[last].state_dict().items():
        assert torch.equal(own[name], tensor), name


def test_a_pre_gated_decoder_gives_equal_outputs_in_one_pass_and_step_by_step():
    """As in beam search, hypotheses are reordered, dropped and duplicated before every step."""
    model, state = build("decoder", moe_pregate=1)[0].eval(), {}
    prefix, generator = torch.empty(3, 0, dtype=torch.int64), torch.Generator().manual_seed(1)
    for order in ([0, 1, 2], [2, 0, 0], [1, 1, 0], [2, 1, 0]):
        model.decoder.reorder_incremental_state_scripting(state, torch.tensor(order))
        words = torch.tensor([0, 2, 3])[torch.randint(3, (3, 1), generator=generator)]
        prefix = torch.cat([prefix[order], words], 1)
        step = model.decoder(prefix, incremental_state=state)[0]
        torch.testing.assert_close(step[:, -1], model(prefix)[0][:, -1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="2 but the decoder has 2 MoE layers; give 1 to 1"):
        build("decoder", moe_pregate=2)


def test_encoder_and_decoder_compute_capacity_from_separate_sentence_lengths():
    fraction = {"moe_eval_capacity_token_fraction": 0.25, "moe_eval_capacity_max_seqlen": True}
    model, _ = build("encoder", max_source_positions=40, max_target_positions=28, **fraction)
    lengths = {layer.label: layer.config.eval_sentence_length for layer in moe_layers(model)}
    assert lengths == {"encoder_1": 40, "encoder_3": 40, "decoder_1": 28}
    fraction["moe_eval_capacity_token_fraction"] = -1.0  # a fraction of -1 means the training capacity
    model, _ = build("encoder", max_source_positions=40, **fraction)
    assert {layer.config.eval_sentence_length for layer in moe_layers(model)} == {0}
    fraction["moe_eval_capacity_token_fraction"] = 0.1
    with pytest.raises(ValueError, match="of this model has no --max-target-positions; remove"):
        _sentence_length(argparse.Namespace(**fraction), "decoder")


@pytest.mark.parametrize("sides", ("both", "encoder", "decoder"))
def test_moe_pregate_sides_selects_the_sides_with_pre_gating(sides):
    model, _ = build("encoder", moe_pregate=1, moe_freq=1, moe_pregate_sides=sides)
    routed = {layer.label.partition("_")[0] for layer in moe_layers(model) if layer.router is not None}
    assert routed == ({"encoder", "decoder"} if sides == "both" else {sides})
    with pytest.raises(ValueError, match="is 1 but the decoder has 0 MoE layers; remove the option"):
        build("encoder", moe_pregate=1, decoder_moe_freq=0, moe_pregate_sides="decoder")


def run_of(side, criterion, *words, **overrides):
    """Return the configuration and the task of a training run."""
    words = ["--criterion", criterion, "--optimizer", "moe_adam", "--save-dir", "x", "--cpu", *words]
    cfg = configuration(side, *words, **overrides)
    task = tasks.TASK_REGISTRY[cfg.task._name](cfg.task, *[Dictionary()] * (1 + (side == "encoder")))
    return cfg, task


REFUSED = {
    "--moe-expert-parallel-size 3": "is 3, which does not fit the number of ranks (1)",
    "--moe-top-k 5": "top_k (--moe-top-k) is 5, but a token can choose from 3 experts; give 1 to 3",
    "--moe-expert-count 0": "--moe-expert-count is '0'; give a number of at least 1",
    "--moe-expert-count=-2": "--moe-expert-count is '-2'; give a number of at least 1",
    "--moe-expert-count 4,4,4": "is '4,4,4', which has 3 numbers, but the model has 2 MoE layers; give",
    "--moe-freq 5": "no layer gets experts (4 decoder layers, --moe-freq 5); give a --moe-freq of at",
    "--moe-freq 0": "no layer gets experts (4 decoder layers, --moe-freq 0); give a --moe-freq of at",
    "--moe-top1-expert --moe-top-k 4": "--moe-top1-expert and --moe-top-k 4 are both given; remove one",
    "--moe-gating-use-fp32 --no-moe-gating-use-fp32": "--no-moe-gating-use-fp32 are both given; remove one",
    "--fp16": "--fp16 is set on a CPU, but needs a GPU; remove it.",
    "--amp": "--amp is True, which does not work with experts; give --bf16 or --fp16.",
    "--quant-noise-pq 0.1": "--quant-noise-pq is 0.1: experts do not support quantization noise; set it",
    "--base-layers 1": "--base-layers is 1: BASE layers are a different kind of experts; set it to 0",
    "--moe-pregate 2": "pregate (--moe-pregate) is 2 but the decoder has 2 MoE layers; give 1 to 1",
    "--moe-pregate 1 --checkpoint-activations": "is 1, so gates read the input of an earlier layer",
    "--moe-pregate 1 --decoder-layerdrop 0.1": "is 1, so gates read the input of an earlier layer",
    "--moe-offload-optimizer --memory-efficient-bf16": "--memory-efficient-bf16 is set, which does not",
    "--moe-offload-optimizer --optimizer moe_adafactor": "--optimizer is moe_adafactor, which needs",
    "--moe-offload-optimizer --fp16-adam-stats": "--fp16-adam-stats is set, which needs complete experts",
}


@pytest.mark.parametrize("words", REFUSED)
def test_the_error_for_a_bad_option_names_the_option(words):
    cfg, task = run_of("decoder", "moe_cross_entropy", *words.split())
    with pytest.raises(ValueError, match=re.escape(REFUSED[words])):
        task.build_model(cfg.model)
    guard.set_timeout(0)  # reset the time-out, which applies to the whole process


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_the_error_for_a_bad_moe_freq_names_the_encoder_or_decoder_flag(side):
    cfg, task = run_of("encoder", "moe_label_smoothed_cross_entropy", f"--{side}-moe-freq=-3")
    with pytest.raises(ValueError, match=f"^--{side}-moe-freq is -3; give a whole number of layers"):
        task.build_model(cfg.model)


REFUSED_ON_TWO_RANKS = {
    "--decoder-layerdrop 0.2": "--decoder-layerdrop is 0.2, so ranks would drop different layers",
    "--optimizer moe_adafactor": "--optimizer is moe_adafactor, which needs",
}


@pytest.mark.parametrize("words", REFUSED_ON_TWO_RANKS)
def test_options_that_cannot_work_on_several_ranks_are_refused(words):
    ranks = ("--distributed-world-size", "2", "--ddp-backend", "legacy_ddp")
    cfg, task = run_of("decoder", "moe_cross_entropy", *ranks, *words.split())
    model = TransformerLanguageModel.build_model(cfg.model, task)
    two = Topology(world_size=2, expert_parallel_size=2)
    with pytest.raises(ValueError, match=re.escape(REFUSED_ON_TWO_RANKS[words])):
        refuse_run(cfg, model, two, in_step=False, sliced=False, ahead=0)


def test_moe_local_drop_is_refused_if_experts_are_split_over_ranks():
    cfg, task = run_of("decoder", "moe_cross_entropy", "--moe-local-drop", "0.1")
    model = TransformerLanguageModel.build_model(cfg.model, task)
    with pytest.raises(ValueError, match=r"^--moe-local-drop is 0.1, which needs complete experts"):
        refuse_run(cfg, model, Topology(), in_step=False, sliced=True, ahead=0)
    refuse_run(cfg, model, Topology(), in_step=False, sliced=False, ahead=0)
