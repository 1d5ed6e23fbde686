"""Defines the masked language models RoBERTa and XLM-RoBERTa."""

from dataclasses import replace
from typing import Any

from fairseq_tutel.convert.released.table import Family, Names, Option, Setup

OURS = "encoder.sentence_encoder"
LAYER, OUR_LAYER = "roberta.encoder.layer.*", f"{OURS}.layers.*"
POSITIONS = f"{OURS}.embed_positions.weight"


def _layer(theirs: str, ours: str) -> Names:
    suffix = ".{weight,bias}"
    return Names(f"{LAYER}.{theirs}{suffix}", f"{OUR_LAYER}.{ours}{suffix}", "encoder_layers")


def _task(setup: Setup) -> dict[str, Any]:
    return {"tokens_per_sample": setup.options["max_positions"]}


ROBERTA = Family(
    name="roberta",
    architectures=("RobertaForMaskedLM",),
    prefix="roberta.",
    arch="roberta",
    task="masked_lm",
    names=(
        Names(
            "roberta.embeddings.word_embeddings.weight lm_head.decoder.weight",
            f"{OURS}.embed_tokens.weight encoder.lm_head.weight",
        ),
        Names("roberta.embeddings.position_embeddings.weight", POSITIONS),
        Names("roberta.embeddings.LayerNorm.{weight,bias}", f"{OURS}.layernorm_embedding.{{weight,bias}}"),
        _layer("attention.self.{query,key,value}", "self_attn.{q,k,v}_proj"),
        _layer("attention.output.{dense,LayerNorm}", "{self_attn.out_proj,self_attn_layer_norm}"),
        _layer("{intermediate.dense,output.dense,output.LayerNorm}", "{fc1,fc2,final_layer_norm}"),
        Names(
            "lm_head.{dense,layer_norm}.{weight,bias}", "encoder.lm_head.{dense,layer_norm}.{weight,bias}"
        ),
        Names("lm_head.bias lm_head.decoder.bias", "encoder.lm_head.bias"),
    ),
    options=(
        Option("num_hidden_layers", "encoder_layers", 12),
        Option("hidden_size", "encoder_embed_dim", 768),
        Option("intermediate_size", "encoder_ffn_embed_dim", 3072),
        Option("num_attention_heads", "encoder_attention_heads", 12),
        Option("max_position_embeddings", "max_positions|tokens_per_sample", 514, offset=2),
        Option("hidden_dropout_prob", "dropout", 0.1),
        Option("attention_probs_dropout_prob", "attention_dropout", 0.1),
        # In fairseq, the language-model head also uses this activation; in transformers, it uses gelu.
        Option("hidden_act", "activation_fn", "gelu", {"gelu": "gelu"}),
    ),
    fixed={
        "encoder_layers_to_keep": None,
        "encoder_learned_pos": True,
        "encoder_normalize_before": False,
        "layernorm_embedding": True,
        "no_scale_embedding": True,
        "no_token_positional_embeddings": False,
        "untie_weights_roberta": False,
    },
    assumed={
        "layer_norm_eps": 1e-5,
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "tie_word_embeddings": True,
        "type_vocab_size": 1,
    },
    written={
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "layer_norm_eps": 1e-5,
        "type_vocab_size": 1,
    },
    dropped=r"roberta\.(pooler\..*|embeddings\.(position|token_type)_ids)",
    summed={POSITIONS: "roberta.embeddings.token_type_embeddings.weight"},
    constants={f"{OURS}.version": (3.0,)},
    vocabulary_sizes={"vocab_size": f"{OURS}.embed_tokens.weight"},
    vocabulary="gpt2",
    setup=_task,
)
XLM_ROBERTA = replace(
    ROBERTA,
    name="xlm-roberta",
    architectures=("XLMRobertaForMaskedLM",),
    vocabulary="sentencepiece",
    task="multilingual_masked_lm",
)
