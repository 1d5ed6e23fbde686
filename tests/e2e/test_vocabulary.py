"""`convert vocabulary` adds a language to a trained model, and changes the order of a dictionary."""

import re
import shutil

import pytest
from cli import USER_DIR, fairseq, refused, start, wait
from corpora import write_text
from models import lm_args, mt_args
from tool_in_process import tool


def binarized(folder, languages, dictionary):
    """Write and binarize word-by-word translations of a text; the language bb reverses each sentence."""
    folder.mkdir()
    for split, lines in (("train", 2000), ("test", 200)):
        write_text(folder / "text", lines, seed=len(split) + lines, longest=9)
        for language in languages:
            text = (folder / "text").read_text().replace("w", language[0]).splitlines()
            lines = [" ".join(line.split()[:: -1 if language == "bb" else 1]) for line in text]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    for language in languages[1:]:
        fairseq(
            "preprocess", "-s", "en", "-t", language, "--trainpref", folder / "train", "--testpref",
            folder / "test", "--destdir", folder / "bin", "--srcdict", dictionary, "--joined-dictionary",
            "--workers", 1,
        )  # fmt: skip
    return folder / "bin"


def task_of(languages):
    pairs = ",".join(f"en-{other},{other}-en" for other in languages[1:])
    return (
        "--task", "moe_translation_multi_simple_epoch", "--langs", ",".join(languages), "--lang-pairs",
        pairs, "--encoder-langtok", "tgt", "--decoder-langtok",
    )  # fmt: skip


def trained(data, folder, languages, updates, *words):
    """Train a translation model for all pairs of English and another language; return its checkpoint."""
    sizes = [f"--{s}-{key}" for s in ("encoder", "decoder") for key in ("embed-dim", "ffn-embed-dim")]
    args = mt_args(
        data, folder, *task_of(languages), *(word for flag in sizes for word in (flag, 64)),
        "--encoder-attention-heads", 4, "--decoder-attention-heads", 4, "--lr", 0.003, "--max-tokens", 1200,
        "--lr-scheduler", "polynomial_decay", "--total-num-update", updates, "--warmup-updates", 50,
        "--log-interval", 100, "--disable-validation", *words, updates=updates,
    )  # fmt: skip
    assert wait(start("train", *args), timeout=1500).ok
    return folder / "checkpoint_last.pt"


def translated(data, path, languages, source, target):
    """Translate the test sentences; return the translations by sentence number, and the BLEU score."""
    output = fairseq(
        "generate", data, "--user-dir", USER_DIR, "--path", path, *task_of(languages), "-s", source,
        "-t", target, "--gen-subset", "test", "--beam", 2, "--required-batch-size-multiple", 1,
    ).output  # fmt: skip
    found = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, re.M))
    assert len(found) == 200
    return found, float(re.search(r"BLEU4 = ([\d.]+)", output)[1])


@pytest.mark.long
def test_a_model_of_three_languages_learns_a_fourth(tmp_path):
    old, new = ("en", "aa", "bb"), ("en", "aa", "bb", "cc")
    first, words, made = tmp_path / "first.txt", tmp_path / "words.txt", tmp_path / "made" / "model.pt"
    first.write_text("".join(f"{code[0]}{number} 1\n" for code in old for number in range(40)))
    words.write_text("".join(f"c{number}\n" for number in range(40)))
    made.parent.mkdir()
    three = binarized(tmp_path / "three", old, first)
    base = trained(three, tmp_path / "base", old, 1000)
    added = ("--add-words", words, "--add-languages", "cc")
    tool("convert", "vocabulary", base, "--output", made, *added)
    four = binarized(tmp_path / "four", new, made.parent / "dict.en.txt")
    known = [pair for other in old[1:] for pair in (("en", other), (other, "en"))]
    before = {pair: translated(three, base, old, *pair) for pair in known}
    assert {pair: translated(four, made, new, *pair) for pair in known} == before
    tuned = trained(four, tmp_path / "tuned", new, 200, "--finetune-from-model", made)
    assert all(translated(four, tuned, new, *pair)[1] > before[pair][1] - 0.5 for pair in known)
    assert all(translated(four, tuned, new, *pair)[1] > 90 for pair in (("en", "cc"), ("cc", "en")))


def test_a_run_refuses_a_dictionary_in_another_order_until_the_checkpoint_is_converted(lm_data, tmp_path):
    base = tmp_path / "base"
    fairseq("train", *lm_args(lm_data, base, updates=2))
    shutil.copytree(lm_data, tmp_path / "other")
    file = tmp_path / "other" / "dict.txt"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    last, made = base / "checkpoint_last.pt", tmp_path / "made.pt"
    distill = ("--criterion", "moe_distillation", "--distill-criterion", "moe_cross_entropy")
    ways = ("--restore-file", "--finetune-from-model", "--distill-teacher")
    for way, ranks in zip(ways, (2, 1, 1), strict=True):
        words = (*(distill if way == "--distill-teacher" else ()), way, last)
        output = refused("train", *lm_args(file.parent, tmp_path / "no", *words), ranks=ranks)
        assert "was saved with another dictionary of its decoder" in output
        assert "`fairseq-tutel convert vocabulary`" in output.splitlines()[-1]
    options = ("--output", made, "--data", file.parent)
    printed = fairseq("tutel-__main__", "convert", "vocabulary", last, *options).output
    assert "48 -> 48 symbols, 48 kept" in printed
    tuned = ("--finetune-from-model", made)
    run = fairseq("train", *lm_args(file.parent, tmp_path / "yes", *tuned, updates=1))
    assert run.stats("train_inner")
