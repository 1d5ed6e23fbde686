"""Write a folder with a small random model in the format of the released NLLB-200.

The folder replaces a released model of several gigabytes in tests. The tokenizer is trained on text files.
"""

import argparse
import json
import math
from pathlib import Path

import sentencepiece
import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["M2M100ForConditionalGeneration"],
    "model_type": "m2m_100",
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_function": "relu",
    "max_position_embeddings": 1024,
    "scale_embedding": True,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "is_encoder_decoder": True,
}


def main() -> None:
    """Read the command line and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", nargs="+", type=Path, help="text files on which the tokenizer is trained")
    parser.add_argument("--languages", default="deu_Latn,eng_Latn", help="codes [deu_Latn,eng_Latn]")
    parser.add_argument("--vocab-size", type=int, default=2000, help="pieces of words, at most [2000]")
    arguments = parser.parse_args()
    folder, languages = arguments.folder, arguments.languages.split(",")
    folder.mkdir(parents=True, exist_ok=True)
    pieces = tokenizer(folder, arguments.texts, arguments.vocab_size)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    special |= {"sep_token": "</s>", "cls_token": "<s>", "mask_token": "<mask>"}
    # fairseq's four special tokens replace sentencepiece's three. Languages and <mask> are at the end.
    first = dict(enumerate(("<s>", "<pad>", "</s>", "<unk>")))
    added = first | dict(enumerate([*languages, "<mask>"], pieces + 1))
    settings = {
        **special,
        "tokenizer_class": "NllbTokenizer",
        "additional_special_tokens": languages,
        "added_tokens_decoder": {str(i): {"content": token, "special": True} for i, token in added.items()},
    }
    config = {**CONFIG, "vocab_size": pieces + 1 + len(languages) + 1}
    for name, content in (("tokenizer_config.json", settings), ("config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    torch.manual_seed(1)
    tensors = dict(weights(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"{folder}: {count:,} random weights, {config['vocab_size']:,} tokens")


def tokenizer(folder: Path, texts: list[Path], size: int) -> int:
    """Train a sentencepiece model and write it into the folder; return the number of its pieces."""
    model = folder / "sentencepiece.bpe.model"
    with model.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            input=",".join(map(str, texts)),
            model_writer=file,
            model_type="bpe",
            vocab_size=size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            minloglevel=2,
        )
    return sentencepiece.SentencePieceProcessor(model_file=str(model)).vocab_size()


def weights(config: dict) -> list[tuple[str, torch.Tensor]]:
    """Return all tensors of the model with random values, by name."""
    dim = config["d_model"]
    table = torch.randn(config["vocab_size"], dim) / math.sqrt(dim)
    table[config["pad_token_id"]] = 0
    found = [("model.shared.weight", table)]
    for side in ("encoder", "decoder"):
        hidden = config[f"{side}_ffn_dim"]
        attentions = ["self_attn"] + ["encoder_attn"] * (side == "decoder")
        for i in range(config[f"{side}_layers"]):
            layer = f"model.{side}.layers.{i}"
            for name in attentions:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    found += linear(f"{layer}.{name}.{part}", dim, dim)
                found += norm(f"{layer}.{name}_layer_norm", dim)
            found += linear(f"{layer}.fc1", dim, hidden) + linear(f"{layer}.fc2", hidden, dim)
            found += norm(f"{layer}.final_layer_norm", dim)
        found += norm(f"model.{side}.layer_norm", dim)
    return found


def linear(name: str, inputs: int, outputs: int) -> list[tuple[str, torch.Tensor]]:
    """Return weight and bias of a linear layer."""
    weight = torch.randn(outputs, inputs) * math.sqrt(2 / (inputs + outputs))
    return [(f"{name}.weight", weight), (f"{name}.bias", torch.zeros(outputs))]


def norm(name: str, dim: int) -> list[tuple[str, torch.Tensor]]:
    """Return weight and bias of a layer norm."""
    return [(f"{name}.weight", torch.ones(dim)), (f"{name}.bias", torch.zeros(dim))]


if __name__ == "__main__":
    main()
