"""Defines the encoder-decoders: M2M100 and NLLB, BART, mBART, and FSMT (WMT19)."""

from fairseq_tutel.convert.released.table import (
    ACTIVATIONS,
    Family,
    Names,
    Option,
    switch,
    transformer_layer,
)

SHARED = Names(
    "model.shared.weight model.encoder.embed_tokens.weight model.decoder.embed_tokens.weight lm_head.weight",
    "encoder.embed_tokens.weight decoder.embed_tokens.weight decoder.output_projection.weight",
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
# Without this version, fairseq treats a pre-norm model as an old one and drops the final layer norms.
VERSIONS = {"encoder.version": (3.0,), "decoder.version": (3.0,)}
SIZES = (
    Option("encoder_layers", "encoder_layers", 12),
    Option("decoder_layers", "decoder_layers", 12),
    Option("encoder_ffn_dim", "encoder_ffn_embed_dim", 4096),
    Option("decoder_ffn_dim", "decoder_ffn_embed_dim", 4096),
    Option("encoder_attention_heads", "encoder_attention_heads", 16),
    Option("decoder_attention_heads", "decoder_attention_heads", 16),
    Option("d_model", "encoder_embed_dim decoder_embed_dim decoder_input_dim decoder_output_dim", 1024),
    Option("max_position_embeddings", "max_source_positions max_target_positions", 1024),
    Option("dropout", "dropout", 0.1),
    Option("activation_dropout", "activation_dropout", 0.0),
)
# Options of fairseq's transformer that add or change computations; no family here has them.
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
TIED = {"share_all_embeddings": True, "share_decoder_input_output_embed": True}
IDS = {
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "is_encoder_decoder": True,
}

M2M100 = Family(
    name="m2m_100",
    architecture="M2M100ForConditionalGeneration",
    prefix="model.",
    arch="transformer",
    task="translation_multi_simple_epoch",
    names=(SHARED, *LAYERS, FINAL_NORMS),
    options=(
        *SIZES,
        Option("activation_function", "activation_fn", "relu", ACTIVATIONS),
        Option("attention_dropout", "attention_dropout", 0.1),
        Option("encoder_layerdrop", "encoder_layerdrop", 0.05),
        Option("decoder_layerdrop", "decoder_layerdrop", 0.05),
        switch("scale_embedding", "no_scale_embedding", True, opposite=True),
    ),
    fixed={
        **PLAIN,
        **TIED,
        "encoder_normalize_before": True,
        "decoder_normalize_before": True,
        "encoder_learned_pos": False,
        "decoder_learned_pos": False,
        "layernorm_embedding": False,
    },
    assumed={"tie_word_embeddings": True},
    written=IDS,
    dropped=r"model\.(encoder|decoder)\.embed_positions\.weights?",
    constants=VERSIONS,
)
