"""`convert from-hf` with the tokenizer.json of a fast tokenizer, with and without the other files."""

import json
import shutil

import pytest
from released_models import saved
from tool_in_process import convert

transformers = pytest.importorskip("transformers")


@pytest.mark.long
@pytest.mark.parametrize("name", ["nllb", "mbart50", "xlm_roberta", "xglm", "roberta", "bart"])
@pytest.mark.parametrize("removed", [(), ("sentencepiece.bpe.model", "vocab.json", "merges.txt")])
def test_a_fast_tokenizer_gives_its_token_ids(name, removed, tmp_path):
    folder = tmp_path / "slow"
    model, slow = saved(name, folder)
    source = tmp_path / "hf"
    source.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(folder / file, source)
    fast = getattr(transformers, f"{type(slow).__name__}Fast").from_pretrained(folder)
    fast.save_pretrained(source)
    for file in removed:
        (source / file).unlink(missing_ok=True)
    printed = convert("from-hf", source, "--output", tmp_path / "ours")
    assert ("has no SentencePiece model" in printed) == (bool(removed) and name not in ("roberta", "bart"))
    symbols = [
        line.rpartition(" ")[0] for line in (tmp_path / "ours" / "dict.txt").read_text().splitlines()
    ]
    assert len(symbols) == model.config.vocab_size - 4
    encoder = tmp_path / "ours" / "encoder.json"
    numbers = (
        {str(i): token for token, i in json.loads(encoder.read_text()).items()} if encoder.exists() else {}
    )
    for i, symbol in enumerate(symbols, 4):
        token = fast.convert_ids_to_tokens(i)
        assert numbers.get(symbol, symbol) in (token, f"__{token}__", f"[{token}]") or token is None, i
