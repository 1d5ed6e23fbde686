"""Models that `from_checkpoint` opens give the results of fairseq's commands."""

import io
import logging
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch
from cli import USER_DIR, fairseq
from doc_examples import run_example
from models import lm_args, mt_args
from PIL import Image
from terminal import terminal
from tool_in_process import refusal_of, tool

import fairseq_tutel
from fairseq_tutel import plugin


@pytest.fixture(scope="module")
def mt(mt_data, tmp_path_factory):
    """The --save-dir of a translation model, with a sharded checkpoint that two ranks wrote."""
    folder = tmp_path_factory.mktemp("mt-run")
    fairseq("train", *mt_args(mt_data, folder, "--moe-checkpoint", "sharded", updates=4), ranks=2)
    return folder


@pytest.fixture(scope="module")
def lm(lm_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm-run")
    fairseq("train", *lm_args(lm_data, folder, updates=4))
    return folder / "checkpoint_last.pt"


def test_translate_gives_the_output_of_fairseq_generate(mt, mt_data):
    path, lengths = mt / "checkpoint_best.pt", {"max_len_a": 0, "max_len_b": 8}
    run = fairseq(
        "generate", mt_data, "--user-dir", USER_DIR, "--path", path, "--beam", 3, "--max-len-b", 8,
        "--task", "moe_translation", "--batch-size", 7, "--required-batch-size-multiple", 1,
    )  # fmt: skip
    printed = {int(i): text for i, text in re.findall(r"^D-(\d+)\t\S+\t(.*)$", run.output, re.M)}
    sources = (mt_data.parent / "test.de").read_text().splitlines()
    expected = [printed[i] for i in range(len(sources))]
    with terminal() as drawn:
        model = fairseq_tutel.from_checkpoint(mt)
        bars = re.findall(r"(\w[\w .]*):   0%\|", drawn())
        assert bars == ["checking checkpoint_best.pt"]
    assert model.translate(sources, beam=3, **lengths) == expected and len(set(expected)) > 1
    assert model.translate(sources[0], beam=3, **lengths) == expected[0]
    store = {"moe_expert_store": "on-demand", "moe_expert_cache": "9KB"}
    stored = fairseq_tutel.from_checkpoint(path, **store)
    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda text: stored.translate(text, beam=3, **lengths), sources)
        assert list(answers) == expected
    experts = stored.models[0].encoder.layers[0].fc1.experts
    assert all(parameter.is_meta for parameter in experts.parameters())


def test_score_gives_the_output_of_eval_lm_and_sample_gives_the_most_probable_words(lm, lm_data):
    run = fairseq(
        "eval-lm", lm_data, "--user-dir", USER_DIR, "--path", lm, "--gen-subset", "valid",
        "--sample-break-mode", "eos", "--batch-size", 5, "--output-word-probs",
    )  # fmt: skip
    printed = dict(re.findall(r"eval_lm \| (\d+) (w.*)$", run.output, re.M))
    texts = (lm_data.parent / "valid.txt").read_text().splitlines()
    model = fairseq_tutel.from_checkpoint(lm)
    found = model.score([texts[int(i)] for i in printed])  # eval-lm skips long texts
    assert len(printed) > 5
    for hypothesis, line in zip(found, printed.values(), strict=True):
        scores = hypothesis["positional_scores"].tolist()
        expected = [float(p) for p in re.findall(r"\[(-[\d.]+)\]", line)]
        assert scores == pytest.approx(expected[: len(scores)], abs=0.006) and len(scores) > 2
    tokens = model.generate(model.encode("w1 w3"), beam=1, max_len_b=9)[0]["tokens"]
    inputs = torch.cat([torch.tensor([2]), tokens[:-1]])
    log_probs_LV = model.models[0](inputs[None])[0][0].log_softmax(-1)
    log_probs_LV[:, 1] = -torch.inf  # sampling never outputs padding
    assert torch.equal(log_probs_LV[2:-1].argmax(-1), tokens[2:-1])
    assert model.sample("w1 w3", max_len_b=9) == model.decode(tokens)


def test_dictionaries_are_read_from_the_checkpoint_folder_or_from_an_argument(lm, lm_data, tmp_path):
    state, path = torch.load(lm, weights_only=False), tmp_path / "moved.pt"
    state["cfg"]["task"]["data"] = "/nowhere"
    torch.save(state, path)
    with pytest.raises(FileNotFoundError, match=r"dict\.txt"):
        fairseq_tutel.from_checkpoint(path)
    expected = fairseq_tutel.from_checkpoint(lm).sample("w1 w3")
    assert fairseq_tutel.from_checkpoint(path, lm_data).sample("w1 w3") == expected
    shutil.copy(lm_data / "dict.txt", tmp_path)
    assert fairseq_tutel.from_checkpoint(f"{path}:{lm}").sample("w1 w3") == expected
    bpe = {"_name": "sentencepiece", "sentencepiece_model": "/nowhere"}
    torch.save({**state, "cfg": {**state["cfg"], "bpe": bpe}}, path)
    level = logging.root.level
    assert fairseq_tutel.from_checkpoint(path, bpe="characters").apply_bpe("ab") == "a b"
    assert logging.root.level == level


def test_translate_prints_a_result_for_every_input_line(mt, lm, mt_data, tmp_path, caplog):
    sources = (mt_data.parent / "test.de").read_text().splitlines()
    long, file = " ".join(["w1"] * 2000), tmp_path / "lines.txt"
    file.write_bytes("\r\n".join([*sources, "", long, sources[0]]).encode())
    translate = ("translate", mt, file, "--beam", 3, "--max-len", 8, "--batch-size", 7)
    options = {"beam": 3, "max_len_a": 0, "max_len_b": 8}
    model = fairseq_tutel.from_checkpoint(mt)
    cut = model.translate(" ".join(["w1"] * 1023), **options)  # the model's limit is 1024 tokens with </s>
    expected = model.translate(sources, **options)
    lines = tool(*translate, "--expert-store", "on-demand").splitlines()
    assert lines == [*expected, "", cut, expected[0]]
    assert f"1 of {len(lines)} lines" in caplog.text
    best = tool(*translate, "--nbest", 2).splitlines()
    pairs = [line.split("\t") if line else ("0", "") for line in best]
    assert [text for _, text in pairs[::2]] == lines and len(best) == 2 * len(lines)
    assert all(float(one[0]) >= float(two[0]) for one, two in zip(pairs[::2], pairs[1::2], strict=True))


def test_the_tools_of_language_models_read_standard_input(lm, monkeypatch, caplog):
    def printed(text, *words):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return tool(*words).splitlines()

    model = fairseq_tutel.from_checkpoint(lm)
    options = {"beam": 1, "max_len_a": 1, "max_len_b": 7}
    expected = [model.sample("w1 w3", **options), "", model.sample("w2", **options)]
    sample = ("sample", lm, "--beam", 1, "--max-len", 7)
    assert printed("w1 w3\n\nw2", *sample) == expected
    shortest = ("--option", "min_len=5")
    assert len(printed("w1 w3\n", *sample, *shortest)[0]) > len(expected[0])
    ((score, count),) = [line.split("\t") for line in printed("w1 w3\n", "score", lm)]
    hypothesis = model.score("w1 w3")
    assert 2 ** float(score) == pytest.approx(float(hypothesis["score"].exp()), rel=1e-3)
    assert int(count) == len(hypothesis["tokens"])
    assert printed("", "score", lm) == [] and "dictionary" not in caplog.text
    assert len(printed("unknown words\nw1 unknown\n", "score", lm)) == 2
    assert "1 of 2 lines have no word of the dictionary" in caplog.text


@pytest.mark.parametrize(
    ("kind", "more", "sentence"),
    [
        ("sample", (), "which sample cannot use; try translate"),
        ("translate", ("--nbest", 9), "--nbest is 9"),
    ],
)
def test_sample_refuses_a_translation_model_and_translate_a_bad_nbest(kind, more, sentence, mt, mt_data):
    assert sentence in refusal_of(kind, mt, mt_data / "dict.de.txt", *more)


def test_classify_gives_the_most_probable_classes_of_an_image(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (12, 6, 8), dtype=np.uint8), np.arange(12) % 3
    for split in ("train", "valid"):
        np.savez(tmp_path / f"{split}.npz", images=images, labels=labels, classes=["a", "b", "c"])
    fairseq(
        "train", tmp_path, "--user-dir", USER_DIR, "--task", "image_classification", "--arch",
        "swin_v2_moe_tiny", "--swin-embed-dim", 8, "--moe-expert-count", 2, "--criterion", "cross_entropy",
        "--optimizer", "sgd", "--lr", 0.01, "--batch-size", 6, "--max-update", 1,
        "--save-dir", tmp_path / "run", "--num-workers", 0,
    )  # fmt: skip
    model = fairseq_tutel.from_checkpoint(tmp_path / "run")
    Image.fromarray(images[2]).save(tmp_path / "image.png")
    from_array, from_file = model.classify([images[2], tmp_path / "image.png"], topk=3)
    x_BCHW = (torch.tensor(images[2]).float() / 255 - 0.5)[None, None] / 0.5
    probabilities_C = model.models[0](x_BCHW)[0].softmax(0)
    assert dict(from_array) == pytest.approx(dict(zip("abc", probabilities_C.tolist(), strict=True)))
    assert from_array == from_file == sorted(from_array, key=lambda pair: -pair[1])
    assert model.classify(images[2]) == from_array[:1]
    with pytest.raises(ValueError, match=r"give an array of uint8 \[height, width, 1\]\.$"):
        model.classify([np.zeros((4, 4, 3), np.uint8)])


def test_from_checkpoint_refuses_a_model_without_a_hub_interface_and_two_bart_models():
    plugin.register()
    from fairseq.models import FairseqEncoderDecoderModel

    from fairseq_tutel.plugin.hub_interfaces import _interface

    task = mock.Mock(spec=["mask_idx"])
    with pytest.raises(ValueError, match=r"path names a Linear of the task Mock, for which there is no"):
        _interface(None, task, [torch.nn.Linear(1, 1)])
    with pytest.raises(ValueError, match=r"2 checkpoints of a .*; give one"):
        _interface(None, task, [mock.Mock(spec=FairseqEncoderDecoderModel)] * 2)


REFUSED = {
    "is corrupt": {"path": "cut.pt"},
    "data is nowhere": {"data": "nowhere"},
    "^moe_expert_stor is not an option": {"moe_expert_stor": "on-demand"},
    "moe-expert-tier.* is disk": {"moe_expert_store": "on-demand"},
    "dtype is torch.int32; give one of torch.float32, ": {"dtype": torch.int32},
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_from_checkpoint_refuses_bad_arguments_with_one_sentence(sentence, lm, tmp_path):
    options, path = dict(REFUSED[sentence]), lm
    if "path" in options:
        path = tmp_path / options.pop("path")
        whole = bytearray(lm.read_bytes())
        whole[len(whole) // 2] ^= 1
        (tmp_path / "cut.pt").write_bytes(whole)
    with pytest.raises(ValueError, match=sentence):
        fairseq_tutel.from_checkpoint(path, **options)


def test_the_example_in_the_docstring_of_from_checkpoint_runs(mt, tmp_path, monkeypatch):
    (tmp_path / "SAVE").symlink_to(mt)
    monkeypatch.chdir(tmp_path)
    run_example("from_checkpoint")
