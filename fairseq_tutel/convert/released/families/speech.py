"""Defines the speech models wav2vec 2.0 and HuBERT before fine-tuning."""

import re
from collections.abc import Mapping
from typing import Any

from fairseq_tutel.convert.released.table import Family, Names, Option
from fairseq_tutel.files import shown

LAYERS = "conv_feature_layers"
CONVOLUTIONS = ("conv_dim", "conv_kernel", "conv_stride")
DEFAULTS = ([512] * 7, [10, 3, 3, 3, 3, 2, 2], [5, 2, 2, 2, 2, 2, 2])
MODES = {"group": "default", "layer": "layer_norm"}
# Matches a list of convolution layers in a fairseq option, such as [(512,3,2)]*4. The option's text is
# untrusted, so it is parsed instead of evaluated.
TERM = r"\[\(\d{1,5},\d{1,5},\d{1,5}\)(?:,\(\d{1,5},\d{1,5},\d{1,5}\))*,?\](?:\*\d{1,3})?"


def convolutions(text: Any) -> list[tuple[int, int, int]]:
    """Parse the fairseq option --conv-feature-layers, such as [(512, 10, 5)] + [(512, 3, 2)] * 4.

    Returns:
        The width, kernel size and stride of each convolution layer.

    Raises:
        ValueError: the text is not a list of convolution layers in this form.
    """
    text = re.sub(r"\s", "", str(text))
    if not re.fullmatch(rf"{TERM}(?:\+{TERM})*", text):
        raise ValueError(
            f"--conv-feature-layers is {shown(text)}; give a list of (width, kernel size, stride), such as "
            "[(512, 10, 5)] + [(512, 3, 2)] * 4."
        )
    found: list[tuple[int, int, int]] = []
    for term in re.findall(TERM, text):
        layers, _, count = term.partition("]*")
        numbers = [int(number) for number in re.findall(r"\d+", layers)]
        found += [*zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)] * int(count or 1)
    return found


def _count(options: Mapping[str, Any]) -> int:
    return len(convolutions(options[LAYERS]))


def _read_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    lists = [config.get(key, default) for key, default in zip(CONVOLUTIONS, DEFAULTS, strict=True)]
    if not all(isinstance(own, list) and len(own) == len(lists[0]) for own in lists):
        raise ValueError(
            "config.json has conv_dim, conv_kernel and conv_stride of different lengths; correct the file."
        )
    layers = convolutions(str([*zip(*lists, strict=True)]))
    if layers[-1][0] == config.get("hidden_size"):
        raise ValueError(
            f"config.json has hidden_size and conv_dim {layers[-1][0]}; fairseq has no projection between "
            "equal widths, so this model cannot be converted."
        )
    return {LAYERS: str(layers)}


def _write_layers(options: Mapping[str, Any]) -> dict[str, Any]:
    columns = zip(*convolutions(options.get(LAYERS)), strict=True)
    found: dict[str, Any] = dict(zip(CONVOLUTIONS, map(list, columns), strict=True))
    return found | {"num_feat_extract_layers": len(found["conv_dim"])}


def _write_codes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json for the convolution layers and for the codebook."""
    final_dim = options.get("final_dim") or options.get("encoder_embed_dim")
    dims = {"codevector_dim": options.get("latent_dim") or final_dim, "proj_codevector_dim": final_dim}
    return _write_layers(options) | dims


def _names(prefix: str) -> tuple[Names, ...]:
    """Return the tensor names of the feature extractor and the transformer."""
    extractor, our_extractor = f"{prefix}feature_extractor.conv_layers", "feature_extractor.conv_layers"
    layer, ours = f"{prefix}encoder.layers.*", "encoder.layers.*"
    norm = "layer_norm.{weight,bias}"
    conv = f"{prefix}encoder.pos_conv_embed.conv"
    return (
        Names(f"{prefix}masked_spec_embed", "mask_emb"),
        Names(f"{extractor}.*.conv.weight", f"{our_extractor}.*.0.weight", _count),
        Names(f"{extractor}.*.conv.bias", f"{our_extractor}.*.0.bias", _count, {"conv_bias": True}),
        Names(
            f"{extractor}.0.{norm}",
            f"{our_extractor}.0.2.{{weight,bias}}",
            when={"extractor_mode": "default"},
        ),
        Names(
            f"{extractor}.*.{norm}",
            f"{our_extractor}.*.2.1.{{weight,bias}}",
            _count,
            {"extractor_mode": "layer_norm"},
        ),
        Names(
            f"{prefix}feature_projection.{{layer_norm,projection}}.{{weight,bias}}",
            "{layer_norm,post_extract_proj}.{weight,bias}",
        ),
        Names(f"{conv}.bias", "encoder.pos_conv.0.bias"),
        # torch 2.1 and older use the names weight_g and weight_v for weight normalization.
        Names(
            f"{conv}.parametrizations.weight.original0 {conv}.weight_g",
            "encoder.pos_conv.0.weight_g",
        ),
        Names(
            f"{conv}.parametrizations.weight.original1 {conv}.weight_v",
            "encoder.pos_conv.0.weight_v",
        ),
        Names(f"{prefix}encoder.{norm}", "encoder.layer_norm.{weight,bias}"),
        Names(
            f"{layer}.attention.{{k,v,q,out}}_proj.{{weight,bias}}",
            f"{ours}.self_attn.{{k,v,q,out}}_proj.{{weight,bias}}",
            "encoder_layers",
        ),
        Names(
            f"{layer}.{{layer_norm,final_layer_norm}}.{{weight,bias}}",
            f"{ours}.{{self_attn_layer_norm,final_layer_norm}}.{{weight,bias}}",
            "encoder_layers",
        ),
        Names(
            f"{layer}.feed_forward.{{intermediate,output}}_dense.{{weight,bias}}",
            f"{ours}.{{fc1,fc2}}.{{weight,bias}}",
            "encoder_layers",
        ),
    )


OPTIONS = (
    Option("num_hidden_layers", "encoder_layers", 12),
    Option("hidden_size", "encoder_embed_dim", 768),
    Option("intermediate_size", "encoder_ffn_embed_dim", 3072),
    Option("num_attention_heads", "encoder_attention_heads", 12),
    Option("hidden_act", "activation_fn", "gelu", {"gelu": "gelu", "relu": "relu"}),
    Option("hidden_dropout", "dropout", 0.1),
    Option("attention_dropout", "attention_dropout", 0.1),
    Option("activation_dropout", "activation_dropout", 0.1),
    Option("feat_proj_dropout", "dropout_input", 0.0),
    Option("layerdrop", "encoder_layerdrop", 0.1),
    Option("feat_extract_norm", "extractor_mode", "group", MODES),
    Option("do_stable_layer_norm", "layer_norm_first", False, {True: True, False: False}),
    Option("conv_bias", "conv_bias", False, {True: True, False: False}),
    Option("num_conv_pos_embeddings", "conv_pos", 128),
    Option("num_conv_pos_embedding_groups", "conv_pos_groups", 16),
    Option("mask_time_prob", "mask_prob", 0.05),
    Option("mask_time_length", "mask_length", 10),
    Option("mask_feature_prob", "mask_channel_prob", 0.0),
    Option("mask_feature_length", "mask_channel_length", 10),
)
FIXED = {"layer_type": "transformer", "target_glu": False}
ASSUMED = {
    "add_adapter": False,
    "adapter_attn_dim": None,
    "conv_pos_batch_norm": False,
    "feat_extract_activation": "gelu",
    "feat_proj_layer_norm": True,
    "layer_norm_eps": 1e-5,
    "use_weighted_layer_sum": False,
}
IGNORED = (
    r"adapter_(kernel_size|stride)|apply_spec_augment|conv_(dim|kernel|stride)|ctc_.*|diversity_loss_weight"
    r"|feat_extract_dropout|final_dropout|freeze_.*|mask_.*|no_mask_.*|num_adapter_layers"
    r"|num_feat_extract_layers|tdnn_.*|xvector_.*"
)
WAV2VEC2 = Family(
    name="wav2vec2",
    architectures=("Wav2Vec2ForPreTraining",),
    prefix="wav2vec2.",
    arch="wav2vec2",
    task="audio_pretraining",
    names=(
        *_names("wav2vec2."),
        Names("quantizer.codevectors", "quantizer.vars"),
        Names(
            "{quantizer.weight_proj,project_q,project_hid}.{weight,bias}",
            "{quantizer.weight_proj,project_q,final_proj}.{weight,bias}",
        ),
    ),
    options=(
        *OPTIONS,
        Option("feat_quantizer_dropout", "dropout_features", 0.0),
        Option("num_codevectors_per_group", "latent_vars", 320),
        Option("num_codevector_groups", "latent_groups", 2),
        Option("codevector_dim", "latent_dim", 256),
        Option("proj_codevector_dim", "final_dim", 256),
        Option("num_negatives", "num_negatives", 100),
        Option("contrastive_logits_temperature", "logit_temp", 0.1),
    ),
    fixed={
        **FIXED,
        "quantize_targets": True,
        "quantize_input": False,
        "quantizer_depth": 1,
        "pos_conv_depth": 1,
        "crop_seq_to_multiple": 1,
    },
    assumed=ASSUMED,
    ignored=IGNORED,
    read_more=_read_layers,
    write_more=_write_codes,
    setup=lambda setup: {"normalize": setup.normalizes},
)
HUBERT = Family(
    name="hubert",
    architectures=("HubertModel",),
    prefix="",
    arch="hubert",
    task="hubert_pretraining",
    words=("--labels", "['ltr']"),
    names=_names(""),
    options=OPTIONS,
    fixed={**FIXED, "conv_pos_batch_norm": False},
    assumed=ASSUMED,
    ignored=IGNORED,
    # HubertModel has no head, so from-hf writes zeros for fairseq's head, and the task has no dictionaries.
    unused={
        "final_proj.weight": "256 encoder_embed_dim",
        "final_proj.bias": "256",
        "label_embs_concat": "",
    },
    read_more=_read_layers,
    write_more=_write_layers,
    setup=lambda setup: {
        "final_dim": 256,
        "normalize": setup.normalizes,
        "task_state": {"dictionaries": [None]},
    },
)
