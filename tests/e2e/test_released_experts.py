"""An imported NLLB-MoE with stock commands: on two ranks, from a store, and fine-tuned."""

import nllb
import pytest
from cli import USER_DIR, fairseq
from tool_in_process import convert


@pytest.mark.long
def test_two_ranks_share_the_experts_of_an_imported_model(tmp_path):
    folder = nllb.plain_folder(tmp_path / "hf").with_name("ours")
    convert("from-hf", "--input", tmp_path / "hf", "--output", folder)
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
