"""Defines the decoder-only language models XGLM and OPT."""

from typing import Any

from fairseq_tutel.convert.released.table import (
    ACTIVATIONS,
    OPPOSITE,
    Family,
    Names,
    Option,
    Setup,
    transformer_layer,
)

TABLE = Names(
    "model.embed_tokens.weight lm_head.weight",
    "decoder.embed_tokens.weight decoder.output_projection.weight",
)
OPT_TABLE = Names(TABLE.theirs.replace("model.", "model.decoder."), TABLE.ours)
VERSION = {"decoder.version": (3.0,)}
SIZE = {"vocab_size": "decoder.embed_tokens.weight"}
WIDTHS = "decoder_embed_dim decoder_input_dim decoder_output_dim"
# XGLM and OPT lack these options of fairseq's transformer_lm, so the options have fixed values.
PLAIN = {
    "adaptive_input": False,
    "adaptive_softmax_cutoff": None,
    "base_layers": 0,
    "character_embeddings": False,
    "decoder_layers_to_keep": None,
    "layernorm_embedding": False,
    "no_decoder_final_norm": False,
    "no_token_positional_embeddings": False,
    "scale_attn": False,
    "scale_fc": False,
    "scale_heads": False,
    "scale_resids": False,
    "decoder_normalize_before": True,
    "share_decoder_input_output_embed": True,
}
IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}


def _task(setup: Setup) -> dict[str, Any]:
    positions = setup.options["max_target_positions"]
    return {"tokens_per_sample": positions, "max_target_positions": positions}


XGLM = Family(
    name="xglm",
    architectures=("XGLMForCausalLM", "XGLMModel"),
    prefix="model.",
    arch="transformer_lm",
    task="language_modeling",
    names=(
        TABLE,
        *transformer_layer("decoder", "model.layers", has_cross_attention=False),
        Names("model.layer_norm.{weight,bias}", "decoder.layer_norm.{weight,bias}"),
    ),
    options=(
        Option("num_layers", "decoder_layers", 24),
        Option("ffn_dim", "decoder_ffn_embed_dim", 4096),
        Option("attention_heads", "decoder_attention_heads", 16),
        Option("d_model", WIDTHS, 1024),
        Option("max_position_embeddings", "max_target_positions|tokens_per_sample", 2048),
        Option("dropout", "dropout", 0.1),
        Option("attention_dropout", "attention_dropout", 0.1),
        Option("activation_dropout", "activation_dropout", 0.0),
        Option("layerdrop", "decoder_layerdrop", 0.0),
        Option("activation_function", "activation_fn", "gelu", ACTIVATIONS),
        Option("scale_embedding", "no_scale_embedding", True, OPPOSITE),
    ),
    fixed={**PLAIN, "decoder_learned_pos": False},
    assumed={"tie_word_embeddings": True, "add_cross_attention": False},
    written={**IDS, "decoder_start_token_id": 2},
    dropped=r"model\.embed_positions\.weights?",
    constants=VERSION,
    vocabulary_sizes=SIZE,
    vocabulary="sentencepiece",
    setup=_task,
)
OPT = Family(
    name="opt",
    architectures=("OPTForCausalLM", "OPTModel"),
    prefix="model.",
    arch="transformer_lm",
    task="language_modeling",
    names=(
        OPT_TABLE,
        Names("model.decoder.embed_positions.weight", "decoder.embed_positions.weight"),
        *transformer_layer("decoder", has_cross_attention=False),
        Names("model.decoder.final_layer_norm.{weight,bias}", "decoder.layer_norm.{weight,bias}"),
    ),
    options=(
        Option("num_hidden_layers", "decoder_layers", 12),
        Option("ffn_dim", "decoder_ffn_embed_dim", 3072),
        Option("num_attention_heads", "decoder_attention_heads", 12),
        Option("hidden_size", WIDTHS, 768),
        Option("word_embed_proj_dim", WIDTHS, 768),
        Option("max_position_embeddings", "max_target_positions|tokens_per_sample", 2048),
        Option("dropout", "dropout", 0.1),
        Option("attention_dropout", "attention_dropout", 0.0),
        Option("layerdrop", "decoder_layerdrop", 0.0),
        Option("activation_function", "activation_fn", "relu", ACTIVATIONS),
    ),
    fixed={**PLAIN, "decoder_learned_pos": True, "no_scale_embedding": True},
    # OPT-350m cannot be converted, because it is post-norm and projects its embeddings.
    assumed={
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
        "tie_word_embeddings": True,
    },
    written={**IDS, "bos_token_id": 2},
    constants=VERSION,
    vocabulary_sizes=SIZE,
    vocabulary="gpt2",
    setup=_task,
)
