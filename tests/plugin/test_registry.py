"""All stock architectures, tasks, criterions and optimizers have a MoE variant, and each builds."""

import argparse
import pickle
import re
from pathlib import Path

import pytest
import torch
from fairseq import models
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.data import Dictionary
from fairseq.logging import metrics
from fairseq.models import (
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_REGISTRY,
    FairseqEncoderModel,
    FairseqLanguageModel,
)
from fairseq.models.nat import FairseqNATModel
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from hydra.core.config_store import ConfigStore

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.criterions.gate_loss import GateLossMixin
from fairseq_tutel.plugin.feed_forward import moe_layers
from fairseq_tutel.plugin.registration.flags import defaults
from fairseq_tutel.plugin.training.task import MoETaskMixin

register()

ROOT = Path(__file__).resolve().parents[2]
# Options of a tiny model, and options that a task would add.
SIZES = {
    **{f"{side}_{part}": 2 for side in ("encoder", "decoder") for part in ("layers", "attention_heads")},
    **{f"{side}_embed_dim": 32 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_embed_dim": 48 for side in ("encoder", "decoder")},
    "encoder_transformer_layers": 2, "decoder_transformer_layers": 2, "decoder_input_dim": 32,
    "decoder_output_dim": 32, "adaptive_input_cutoff": "10,20", "adaptive_softmax_cutoff": "10,20",
    "conv_channels": 32, "prenet_dim": 32, "postnet_conv_dim": 32, "encoder_conv_layers": 1,
    "max_source_positions": 32, "max_target_positions": 32, "tokens_per_sample": 16,
    "label_smoothing": 0.1, "input_feat_per_channel": 16, "input_channels": 1,
    "target_speaker_embed": False, "output_frame_dim": 8, "speaker_embed_dim": 8, "n_frames_per_step": 1,
    "encoder_conv_dim": 32, "decoder_conv_dim": 32, "encoder_kernel_size_list": [3, 3],
    "decoder_kernel_size_list": [3, 3], "encoder_conv_type": "lightweight", "attention_dropout": 0.0,
    "decoder_conv_type": "lightweight", "adaptive_softmax_factor": 4, "dropout": 0.0, "fp16": False,
    "label_rate": 50, "conv_feature_layers": "[(16, 10, 5)] + [(16, 8, 8)] * 2", "conv_pos": 8,
    "conv_pos_groups": 2, "mask_length": 2, "mask_prob": 0.3, "decoder_cross_layers": 2,
    "duration_prediction": "True", "main_and_cross_weights": "0.5,0.5", "adaptive_softmax_dropout": 0.0,
    "tie_adaptive_weights": False, "tie_adaptive_proj": False, "no_token_positional_embeddings": False,
    "share_decoder_input_output_embed": False, "relu_dropout": 0.0,
    "weight_softmax": True,
}  # fmt: skip
OF_TASK = {
    "sample_rate": 16000, "label_rate": 50, "discrete_duration": False, "discrete_f0": False,
    "ignore_duration_input": False, "ignore_f0_input": False,
}  # fmt: skip
MODELS = [name for name in ARCH_MODEL_INV_REGISTRY if name.startswith("moe_")]
# Models that need another model's file or a special task: tests/e2e/test_variants.py trains them.
UNBUILT = {
    "moe_transformer_from_pretrained_xlm", "moe_multilingual_transformer", "moe_wav2vec_ctc",
    "moe_wav2vec_seq2seq", "moe_wav2vec2_laser", "moe_wav2vec_classification", "moe_hubert_ctc",
    "moe_hubert_seq2seq",
}  # fmt: skip
OF_SPEECH = {
    "moe_s2t_transformer", "moe_convtransformer", "moe_s2ut_transformer", "moe_s2spect_transformer",
    "moe_s2t_conformer", "moe_s2ut_conformer", "moe_s2spect_conformer",
}  # fmt: skip
OF_WAVES = {"moe_wav2vec2", "moe_hubert"}
WITHOUT_VARIANT = {"nacrf_transformer", "unity_conformer", "fastspeech2", "lstm"}


class _Task:
    """The attributes of a task that a model reads while it is built."""

    def __init__(self, code):
        words = Dictionary()
        for i in range(40):
            words.add_symbol(f"w{i}")
        self.source_dictionary = self.target_dictionary = words
        self.src_dict = self.tgt_dict = self.dictionary = self.output_dictionary = words
        self.cfg, self.args = argparse.Namespace(**OF_TASK), argparse.Namespace(target_is_code=code)
        self.dictionaries, self.channels = [words], ["a", "b"]
        self.source_dictionaries = self.target_dictionaries = dict.fromkeys(self.channels, words)
        self.channel_names, self.channel_sizes = ("token", "duration", "f0"), (len(words), 1, 1)
        self.data_cfg = argparse.Namespace(hub={}, config={"features": {}})
        self.multitask_tasks = {}

    def max_positions(self):
        return 16

    def get_speaker_embeddings(self, args):
        return None


def _built(arch, **options):
    dataclass = getattr(ARCH_MODEL_REGISTRY[arch], "__dataclass", None)
    stock = {} if dataclass is None else defaults(dataclass)
    stock = {key: value for key, value in stock.items() if not str(value).startswith("${")}
    sizes = {**stock, **SIZES, "moe_freq": 1, "moe_expert_count": "3"}
    args = argparse.Namespace(arch=arch, **{**sizes, **options})
    return models.build_model(args, _Task(code="s2ut" in arch))


def _run(model, name):
    """Run a model on two sentences of different lengths, and return the sum of its output."""
    torch.manual_seed(1)
    tokens, lengths = torch.arange(4, 14).view(2, 5), torch.tensor([5, 3])
    tokens[1, 3:] = Dictionary().pad()
    source = tokens
    if name in OF_SPEECH:
        source, lengths = torch.randn(2, 20, 16), torch.tensor([20, 9])
    if isinstance(model, FairseqNATModel):
        losses = model(tokens, lengths, tokens.clone(), tokens)
        return sum(part["out"].float().sum() for part in losses.values() if "out" in part)
    if name in OF_WAVES:
        mask = torch.arange(3000).expand(2, -1) >= torch.tensor([[3000], [1700]])
        extra = {"target_list": [torch.ones(2, 20).long()]} if name == "moe_hubert" else {}
        output = model(torch.randn(2, 3000), padding_mask=mask, **extra)
        return output["logit_m_list"][0].sum() if extra else output["x"].nan_to_num(0, 0, 0).sum()
    if name == "moe_transformer_ulm":
        return model(tokens, tokens.float(), tokens.float())["token"].sum()
    if name == "moe_speech_dlm":
        channels = model(dict.fromkeys(["a", "b"], tokens))[0]
        return sum(part["pred_token"].sum() for to in channels.values() for part in to.values())
    if isinstance(model, FairseqEncoderModel | FairseqLanguageModel):
        extra = {"lang_id": ["en_XX"] * 2} if name == "moe_xmod" else {}
        return model(tokens, **extra)[0].sum()
    if name.startswith(("moe_tts", "moe_s2spect")):
        target = torch.randn(2, 6, model.decoder.out_dim)
        output = model(source, lengths, target, target_lengths=torch.tensor([6, 4]))
        return output[0].sum() + output[1].sum()
    return model(source, lengths, tokens)[0].sum()


def _sizes(layers):
    """Return a dict that gets each layer's number of tokens, padding included, at its first call."""
    sizes = {}

    def note(layer, inputs):
        sizes.setdefault(layer, inputs[0][..., 0].numel())

    for layer in layers:
        layer.register_forward_pre_hook(note)
    return sizes


@pytest.mark.parametrize("name", sorted(set(MODELS) - UNBUILT))
def test_every_variant_builds_and_runs_and_does_not_route_padding(name):
    assert {f"moe_{arch}" for arch in ARCH_MODEL_INV_REGISTRY[name.removeprefix("moe_")]} == set(
        ARCH_MODEL_INV_REGISTRY[name]
    )
    sides = MODEL_REGISTRY[name].sides
    for arch in ARCH_MODEL_INV_REGISTRY[name]:
        model = _built(arch)
        layers = moe_layers(model)
        assert len(layers) == 2 * len(sides), arch
        sizes = _sizes(layers)
        _run(model, name).backward()
        assert all(layer.experts.fc1_weight.grad is not None for layer in layers), arch
        assert all(layer.record.tally.num_tokens < sizes[layer] for layer in layers), arch


@pytest.mark.parametrize(
    ("arch", "asked", "sides"),
    [
        ("moe_bart_base", False, {"encoder", "decoder"}),
        ("moe_roberta", False, {"encoder"}),
        ("moe_roberta_enc_dec", False, {"encoder"}),
        ("moe_cmlm_transformer", False, set()),
        ("moe_cmlm_transformer", True, {"encoder", "decoder"}),
    ],
)
def test_experts_are_initialized_like_bert_if_the_rest_of_their_side_is(arch, asked, sides):
    layers = moe_layers(_built(arch, apply_bert_init=asked))
    assert {of.name.split(".")[0] for of in layers if of.config.init_std == 0.02} == sides


def test_only_models_that_support_experts_have_a_variant():
    assert {f"moe_{name}" for name in ("transformer", "bart", "roberta", "transformer_lm")} <= {*MODELS}
    assert not {f"moe_{name}" for name in WITHOUT_VARIANT} & {*MODEL_REGISTRY}
    assert not [name for name in MODELS if "parallel" in name]


def test_docs_list_every_fairseq_model_with_its_variant_or_a_reason():
    page = (ROOT / "docs" / "models.md").read_text().split("why it has no")
    rows = [re.findall(r"^\| (.*) \| (.*) \|$", part, re.M) for part in page]
    variants = {name: sides for sides, names in rows[0] for name in re.findall(r"`(\w+)`", names)}
    without = [name for names, _ in rows[1] for name in re.findall(r"`(\w+)`", names)]
    models = {name for name, of in MODEL_REGISTRY.items() if of.__module__.startswith("fairseq.")}
    assert sorted([*variants, *without]) == sorted(models)
    assert variants.keys() == {name for name in models if f"moe_{name}" in MODEL_REGISTRY}
    for name, sides in variants.items():
        assert sides.split(", ") == [*getattr(MODEL_REGISTRY[f"moe_{name}"], "sides", ["encoder"])]


def test_every_stock_optimizer_has_a_variant():
    stock = {name for name in OPTIMIZER_REGISTRY if not name.startswith("moe_")}
    assert {f"moe_{name}" for name in stock} <= set(OPTIMIZER_REGISTRY)
    assert "adam" in stock


@pytest.mark.parametrize("name", sorted(n for n in TASK_REGISTRY if not n.startswith("moe_")))
def test_every_stock_task_has_a_variant(name):  # test_task_options.py tests the system options
    variant, stock = TASK_REGISTRY[f"moe_{name}"], TASK_REGISTRY[name]
    assert issubclass(variant, MoETaskMixin) and issubclass(variant, stock)
    assert variant.__name__ == f"MoE{stock.__name__}"
    assert pickle.loads(pickle.dumps(variant)) is variant
    assert options_in(variant) == options_in(stock)


def options_in(kind):
    parser = argparse.ArgumentParser(conflict_handler="error")
    kind.add_args(parser)
    return {action.dest for action in parser._actions}


@pytest.mark.parametrize("name", sorted(n for n in CRITERION_REGISTRY if not n.startswith("moe_")))
def test_every_stock_criterion_has_a_variant_with_the_balance_loss(name):
    if name in ("composite_loss", "sentence_ranking", "vocab_parallel_cross_entropy"):
        assert f"moe_{name}" not in CRITERION_REGISTRY
        return
    variant, stock = CRITERION_REGISTRY[f"moe_{name}"], CRITERION_REGISTRY[name]
    assert issubclass(variant, GateLossMixin) and issubclass(variant, stock)
    assert variant.__name__ == f"MoE{stock.__name__}"
    assert pickle.loads(pickle.dumps(variant)) is variant
    assert {"moe_gate_loss_wt", "moe_gate_loss_combine_method"} <= options_in(variant) > options_in(stock)


def test_a_criterion_without_a_dataclass_trains_the_balance_loss():
    """The criterion has options on the command line, and logs sums that fairseq's class lacks."""
    parser = argparse.ArgumentParser()
    criterion = CRITERION_REGISTRY["moe_legacy_masked_lm_loss"]
    criterion.add_args(parser)
    model, task = _built("moe_bert_base"), _Task(code=False)
    task._has_experts = True
    criterion = criterion.build_criterion(parser.parse_args(["--moe-gate-loss-wt", "0.5"]), task)
    tokens = torch.arange(4, 14).view(2, 5)
    sample = {
        "net_input": {"src_tokens": tokens, "segment_labels": torch.zeros_like(tokens)},
        "lm_target": tokens, "sentence_target": torch.tensor([0, 1]), "nsentences": 2, "ntokens": 10,
    }  # fmt: skip
    loss, size, log = criterion(model, sample)
    loss.backward()
    assert float(loss - log["nll_loss"]) > 0.4 * size
    assert all(layer.gate.weight.grad.abs().sum() > 0 for layer in moe_layers(model))
    with metrics.aggregate() as logged:
        criterion.reduce_metrics([log])
    assert logged["moe_gate_loss"].avg > 0.5


def test_variants_can_be_chosen_in_hydra():
    store = ConfigStore.instance().repo
    assert "moe_gate_loss_wt" in store["criterion"]["moe_nat_loss.yaml"].node
    assert "moe_zero_stage" in store["task"]["moe_translation_lev.yaml"].node
