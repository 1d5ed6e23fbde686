"""Defines the encoder-decoders M2M100 (also for NLLB), BART, mBART, and FSMT (WMT19)."""

from collections.abc import Mapping
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
from fairseq_tutel.files import shown

SHARED = Names(
    "model.shared.weight model.encoder.embed_tokens.weight model.decoder.embed_tokens.weight "
    "lm_head.weight",
    "encoder.embed_tokens.weight decoder.embed_tokens.weight decoder.output_projection.weight",
)
SEPARATE = (
    Names("model.encoder.embed_tokens.weight", "encoder.embed_tokens.weight"),
    Names(
        "model.decoder.output_projection.weight model.decoder.embed_tokens.weight",
        "decoder.embed_tokens.weight decoder.output_projection.weight",
    ),
)
LAYERS = (*transformer_layer("encoder"), *transformer_layer("decoder"))
FINAL_NORMS = Names(
    "model.{encoder,decoder}.layer_norm.{weight,bias}", "{encoder,decoder}.layer_norm.{weight,bias}"
)
LEARNED_POSITIONS = Names(
    "model.{encoder,decoder}.embed_positions.weight", "{encoder,decoder}.embed_positions.weight"
)
EMBEDDING_NORMS = Names(
    "model.{encoder,decoder}.layernorm_embedding.{weight,bias}",
    "{encoder,decoder}.layernorm_embedding.{weight,bias}",
)
COMPUTED_POSITIONS = r"model\.(encoder|decoder)\.embed_positions\.weights?"
# Without a version in the checkpoint, fairseq drops the final layer norms of a pre-norm model.
VERSIONS = {"encoder.version": (3.0,), "decoder.version": (3.0,)}
LOGITS_BIAS = {"final_logits_bias": "1 vocab_size"}


def _sizes(activation: str, attention_dropout: float, layerdrop: float, scales: bool) -> tuple[Option, ...]:
    """Return the options that all encoder-decoders have; the arguments are transformers' defaults."""
    widths = "encoder_embed_dim decoder_embed_dim decoder_input_dim decoder_output_dim"
    return (
        Option("encoder_layers", "encoder_layers", 12),
        Option("decoder_layers", "decoder_layers", 12),
        Option("encoder_ffn_dim", "encoder_ffn_embed_dim", 4096),
        Option("decoder_ffn_dim", "decoder_ffn_embed_dim", 4096),
        Option("encoder_attention_heads", "encoder_attention_heads", 16),
        Option("decoder_attention_heads", "decoder_attention_heads", 16),
        Option("d_model", widths, 1024),
        Option("max_position_embeddings", "max_source_positions max_target_positions", 1024),
        Option("dropout", "dropout", 0.1),
        Option("attention_dropout", "attention_dropout", attention_dropout),
        Option("activation_dropout", "activation_dropout", 0.0),
        Option("encoder_layerdrop", "encoder_layerdrop", layerdrop),
        Option("decoder_layerdrop", "decoder_layerdrop", layerdrop),
        Option("activation_function", "activation_fn", activation, ACTIVATIONS),
        Option("scale_embedding", "no_scale_embedding", scales, OPPOSITE),
    )


# Hugging Face's models lack these options of fairseq's transformer, so the options have fixed values.
PLAIN = {
    "adaptive_input": False,
    "adaptive_softmax_cutoff": None,
    "base_layers": 0,
    "char_inputs": False,
    "cross_self_attention": False,
    "decoder_layers_to_keep": None,
    "encoder_layers_to_keep": None,
    "no_cross_attention": False,
    "no_decoder_final_norm": False,
    "no_token_positional_embeddings": False,
}
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
POST_NORM = {"encoder_normalize_before": False, "decoder_normalize_before": False}
SINUSOIDAL = {"encoder_learned_pos": False, "decoder_learned_pos": False, "layernorm_embedding": False}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True, "layernorm_embedding": True}
ONE_TABLE = {"share_all_embeddings": True}
# Required entries in the config.json of BART and mBART.
BART_ASSUMED = {
    "tie_word_embeddings": True,
    "normalize_embedding": True,
    "static_position_embeddings": False,
    "extra_pos_embeddings": 2,
}
IDS = {
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "is_encoder_decoder": True,
}
SHARED_SIZE = {"vocab_size": "encoder.embed_tokens.weight"}


def _multilingual(setup: Setup, style: str) -> dict[str, Any]:
    """Return the options of the task translation_multi_simple_epoch for a model with language tokens."""
    languages = setup.languages
    if not languages:
        raise ValueError(
            "INPUT has tokenizer files without symbols of languages, such as __en__ or eng_Latn; give "
            "the tokenizer files of this model."
        )
    return {
        "task": "translation_multi_simple_epoch",
        "langs": languages,
        "lang_pairs": f"{languages[0]}-{languages[-1]}",
        "encoder_langtok": "src",
        "decoder_langtok": True,
        "lang_tok_style": style,
        "share_decoder_input_output_embed": True,
    }


def _mbart(setup: Setup) -> dict[str, Any]:
    options = _multilingual(setup, "mbart")
    if setup.tokenizer.startswith("MBart50"):
        return options
    return {
        "task": "translation_from_pretrained_bart",
        "langs": ",".join(setup.languages),
        "source_lang": setup.languages[0],
        "target_lang": setup.languages[-1],
        "share_decoder_input_output_embed": True,
    }


def _pair(setup: Setup) -> dict[str, Any]:
    source, target = languages_of_pair(setup.config)
    return {"source_lang": source, "target_lang": target}


def _trained_pair(options: Mapping[str, Any]) -> list[str]:
    found = [options.get(f"{side}_lang") for side in ("source", "target")]
    if not all(found):
        raise ValueError("INPUT was trained without --source-lang and --target-lang, which fsmt needs.")
    return [str(language) for language in found]


def languages_of_pair(config: Mapping[str, Any]) -> list[str]:
    """Return the source and the target language in the config.json of an FSMT model."""
    languages = config.get("langs")
    if not isinstance(languages, list) or len(languages) != 2 or not all(map(_is_code, languages)):
        raise ValueError(
            f"config.json has langs {shown(languages)}; give the codes of the source and target language."
        )
    return languages


def _is_code(language: Any) -> bool:
    return isinstance(language, str) and language.isidentifier()


M2M100 = Family(
    name="m2m_100",
    architectures=("M2M100ForConditionalGeneration", "M2M100Model"),
    prefix="model.",
    arch="transformer",
    task="translation_multi_simple_epoch",
    names=(SHARED, *LAYERS, FINAL_NORMS),
    options=_sizes("relu", 0.1, 0.05, scales=True),
    fixed={**PLAIN, **ONE_TABLE, **PRE_NORM, **SINUSOIDAL},
    assumed={"tie_word_embeddings": True},
    written=IDS,
    dropped=COMPUTED_POSITIONS,
    constants=VERSIONS,
    vocabulary_sizes=SHARED_SIZE,
    form="__{}__",
    vocabulary="sentencepiece",
    setup=lambda setup: _multilingual(setup, "multilingual"),
)
BART = Family(
    name="bart",
    architectures=("BartForConditionalGeneration", "BartModel"),
    prefix="model.",
    arch="bart_large",
    task="denoising",
    names=(SHARED, *LAYERS, LEARNED_POSITIONS, EMBEDDING_NORMS),
    options=_sizes("gelu", 0.0, 0.0, scales=False),
    fixed={**PLAIN, **ONE_TABLE, **POST_NORM, **LEARNED},
    assumed={**BART_ASSUMED, "add_final_layer_norm": False, "normalize_before": False},
    written=IDS,
    zeros=LOGITS_BIAS,
    constants=VERSIONS,
    vocabulary_sizes=SHARED_SIZE,
    vocabulary="gpt2",
    setup=lambda setup: {"share_decoder_input_output_embed": True},
)
MBART = Family(
    name="mbart",
    architectures=("MBartForConditionalGeneration", "MBartModel"),
    prefix="model.",
    arch="mbart_large",
    task="translation_from_pretrained_bart",
    names=(SHARED, *LAYERS, LEARNED_POSITIONS, EMBEDDING_NORMS, FINAL_NORMS),
    options=_sizes("gelu", 0.0, 0.0, scales=False),
    fixed={**PLAIN, **ONE_TABLE, **PRE_NORM, **LEARNED},
    assumed={**BART_ASSUMED, "add_final_layer_norm": True, "normalize_before": True},
    written=IDS,
    zeros=LOGITS_BIAS,
    constants=VERSIONS,
    vocabulary_sizes=SHARED_SIZE,
    form="[{}]",
    vocabulary="sentencepiece",
    setup=_mbart,
)
FSMT = Family(
    name="fsmt",
    architectures=("FSMTForConditionalGeneration",),
    prefix="model.",
    arch="transformer_wmt_en_de_big",
    task="translation",
    names=(*SEPARATE, *LAYERS),
    options=_sizes("relu", 0.0, 0.0, scales=True),
    fixed={
        **PLAIN,
        **POST_NORM,
        **SINUSOIDAL,
        "share_all_embeddings": False,
        "share_decoder_input_output_embed": True,
    },
    assumed={"tie_word_embeddings": False},
    ignored="decoder|langs",
    written={**IDS, "tie_word_embeddings": False},
    dropped=COMPUTED_POSITIONS,
    constants=VERSIONS,
    vocabulary_sizes={
        "src_vocab_size": "encoder.embed_tokens.weight",
        "tgt_vocab_size": "decoder.embed_tokens.weight",
    },
    vocabulary="pair",
    setup=_pair,
    write_more=lambda options: {"langs": _trained_pair(options)},
)
