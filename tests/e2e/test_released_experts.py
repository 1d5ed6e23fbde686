"""fairseq's commands open and fine-tune an NLLB-MoE model that was imported from Hugging Face."""

import os
import subprocess
import sys

import nllb
import pytest
from cli import ROOT, USER_DIR, fairseq
from tool_in_process import convert

import fairseq_tutel as ft


@pytest.mark.long
def test_two_ranks_translate_with_an_imported_model_as_one_rank_does(tmp_path):
    folder = nllb.plain_folder(tmp_path / "hf").with_name("ours")
    convert("from-hf", tmp_path / "hf", "--output", folder)
    (tmp_path / "in.txt").write_text("\n".join(nllb.TEXTS) + "\n")
    words = [
        folder, "--user-dir", USER_DIR, "--path", folder / "model.pt",
        "--task", "moe_translation_multi_simple_epoch", "--lang-pairs", "deu_Latn-fra_Latn",
        "--source-lang", "deu_Latn", "--target-lang", "fra_Latn",
        "--langs", ",".join(nllb.LANGUAGES), "--encoder-langtok", "src", "--decoder-langtok",
        "--bpe", "sentencepiece", "--sentencepiece-model", folder / "sentencepiece.bpe.model",
        "--input", tmp_path / "in.txt", "--beam", 2, "--max-len-b", 8, "--num-workers", 0,
    ]  # fmt: skip
    two = ("--moe-expert-parallel-size", 2)
    store = ("--moe-expert-store", "on-demand")
    runs = [
        fairseq("tutel-run", "interactive", *words, *extra, ranks=ranks)
        for ranks, extra in ((1, ()), (1, store), (2, two), (2, (*two, *store)))
    ]
    found = [[line.split("\t") for line in run.logs[0].splitlines() if line[:2] == "H-"] for run in runs]
    assert len(found[0]) == len(nllb.TEXTS)
    for other in found[1:]:
        assert [line[::2] for line in other] == [line[::2] for line in found[0]]
        scores = [[float(line[1]) for line in lines] for lines in (other, found[0])]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.long
def test_the_nllb_example_exports_a_model_that_transformers_opens(tmp_path):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    environment = {**os.environ, "UPDATES": "40", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    corpus = tmp_path / "corpus"
    subprocess.run([sys.executable, ROOT / "examples" / "small_corpus.py", corpus], check=True)
    files = [(corpus / f"train.{suffix}").rename(corpus / f"my.{code}") for suffix, code in
             (("de", "deu_Latn"), ("en", "eng_Latn"))]  # fmt: skip
    command = ["bash", ROOT / "examples" / "nllb.sh", *files, tmp_path / "out"]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    ours = ft.from_checkpoint(tmp_path / "out" / "model")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out" / "export").eval()
    assert type(theirs).__name__ == "NllbMoeForConditionalGeneration"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "export", src_lang="deu_Latn")
    target = tokenizer.convert_tokens_to_ids("eng_Latn")
    for source in ("die schwarze Maus ruft den Vogel im Wald.", "das Kind hört die Katze."):
        (tokens,) = theirs.generate(
            **tokenizer(source, return_tensors="pt"), num_beams=1, do_sample=False, max_new_tokens=20,
            forced_bos_token_id=target,
        )  # fmt: skip
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        got = ours.translate(
            source, beam=1, source_lang="deu_Latn", target_lang="eng_Latn", max_len_a=0, max_len_b=19
        )
        assert got == expected and got
