"""Makes small random NLLB models with the library transformers, and computes their outputs."""

import io
import json
import math
from functools import cache

import torch

LANGUAGES = ("deu_Latn", "eng_Latn", "fra_Latn")
SENTENCE = "der die das hund katze maus sieht hört sucht einen kleinen großen im garten wald haus"
WORDS = SENTENCE.split()
TEXTS = ("der hund sieht die katze", "die maus sucht das haus im wald", "katze")
SIZES = {
    "d_model": 16, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_experts": 4,
    "encoder_sparse_step": 2, "decoder_sparse_step": 2, "max_position_embeddings": 64,
}  # fmt: skip


@cache
def sentencepiece_model():
    """Train a small sentencepiece model; return its bytes."""
    import sentencepiece

    content = io.BytesIO()
    lines = [" ".join(WORDS[i] for i in range(start, start + 5)) for start in range(len(WORDS) - 5)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=content, vocab_size=60, hard_vocab_limit=False,
        model_type="bpe", minloglevel=2,
    )  # fmt: skip
    return content.getvalue()


def pieces():
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())


def vocab_size():
    """Return the vocabulary size: sentencepiece's, one more special token, languages and <mask>."""
    return pieces().vocab_size() + 1 + len(LANGUAGES) + 1


def language_id(language):
    return pieces().vocab_size() + 1 + LANGUAGES.index(language)


def encoded(text, language):
    """Return the token IDs that NLLB's tokenizer gives for a source sentence."""
    return [language_id(language), *(i + 1 for i in pieces().encode(text)), 2]


def moe_model(seed=1, **options):
    """Return a random NllbMoeForConditionalGeneration whose gates and experts differ clearly."""
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    torch.manual_seed(seed)
    config = NllbMoeConfig(vocab_size=vocab_size(), **{**SIZES, **options})
    model = NllbMoeForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "shared" not in name and "embed" not in name:
                scale = 4 if "router" in name else 1
                parameter.normal_(std=scale / math.sqrt(parameter.shape[-1]))
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif parameter.dim() > 1:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
    return model


def save(model, folder, **keywords):
    """Save a model with the tokenizer files of NLLB; return the folder."""
    model.save_pretrained(folder, **keywords)
    return tokenizer_files(folder)


def tokenizer_files(folder):
    """Write the tokenizer files of NLLB into a folder; return the folder."""
    (folder / "sentencepiece.bpe.model").write_bytes(sentencepiece_model())
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    special |= {"sep_token": "</s>", "cls_token": "<s>", "mask_token": "<mask>"}
    settings = {**special, "tokenizer_class": "NllbTokenizer", "additional_special_tokens": LANGUAGES}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def batch(padded=True):
    """Return source tokens [B, S], and target tokens [B, L] that begin with </s> and the language."""
    generator = torch.Generator().manual_seed(3)
    sources = [encoded(text, "deu_Latn") for text in TEXTS]
    if not padded:
        sources = torch.randint(4, pieces().vocab_size(), (3, 9), generator=generator).tolist()
    length = max(map(len, sources))
    src_BS = torch.tensor([source + [1] * (length - len(source)) for source in sources])
    random_BL = torch.randint(4, pieces().vocab_size(), (len(sources), 6), generator=generator)
    start_B2 = torch.tensor([[2, language_id("fra_Latn")]]).expand(len(sources), -1)
    return src_BS, torch.cat([start_B2, random_BL], dim=1)


@torch.no_grad()
def their_logits(model, src_BS, tgt_BL):
    """Return the logits [B, L, V] of a model of the library transformers."""
    return model(input_ids=src_BS, attention_mask=src_BS.ne(1).long(), decoder_input_ids=tgt_BL).logits


@torch.no_grad()
def our_logits(model, src_BS, tgt_BL):
    """Return the logits [B, L, V] of a model of fairseq."""
    return model(src_BS, src_BS.ne(1).sum(1), tgt_BL)[0]


def plain_folder(folder, files=3, **sizes):
    """Write a random NLLB-MoE in several safetensors files, without transformers; return the folder.

    The tensors of an expert are in different files.
    """
    from safetensors.torch import save_file

    from fairseq_tutel.convert.released.families.nllb_moe import NLLB_MOE

    config = {"model_type": "nllb-moe", "vocab_size": vocab_size(), **SIZES, **sizes}
    options = NLLB_MOE.read_options(config)
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for row in NLLB_MOE.rows(options):
        tensors[row.theirs[0]] = torch.randn(_shape(row.theirs[0], config), generator=generator)
    for names, shape in NLLB_MOE.stacks(options).values():
        tensors |= {name: torch.randn(shape, generator=generator) for name in names}
    folder.mkdir(parents=True)
    names, where = list(tensors), {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        own = {name: tensors[name] for name in names[i::files]}
        save_file(own, folder / file)
        where |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    return tokenizer_files(folder)


def _shape(name, config):
    dim = config["d_model"]
    if "shared" in name:
        return config["vocab_size"], dim
    if name.endswith("bias") or "norm" in name:
        return (config[f"{name.split('.')[1]}_ffn_dim"],) if ".fc1." in name else (dim,)
    if "router" in name:
        return config["num_experts"], dim
    hidden = config[f"{name.split('.')[1]}_ffn_dim"]
    return {"fc1": (hidden, dim), "fc2": (dim, hidden)}.get(name.split(".")[-2], (dim, dim))
