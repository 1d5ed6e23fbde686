"""A folder of a teacher's answers: what is read is what was written, by whomever, or it is refused."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fairseq_tutel.distillation import stored_logits
from fairseq_tutel.distillation.loss import Answers
from fairseq_tutel.distillation.stored_logits import StoredLogits, fingerprint

K = 3
FACTS = {"the dictionary": "d", "the teacher": "t", "--distill-top-k": K}


def opened(folder, **other):
    return StoredLogits(str(folder), {**FACTS, **other}, K)


def answers(sample, tokens=4):
    generator = torch.Generator().manual_seed(sample)
    words = torch.randint(100, (tokens, K), generator=generator)
    return Answers(words, torch.randn(tokens, K, generator=generator))


def text(sample):
    return fingerprint(torch.tensor([sample, 5]), torch.tensor([7]))


def holds(store, sample, tokens=4):
    found = store.read(sample, text(sample))
    if found is None:
        return False
    expected = answers(sample, tokens)
    assert torch.equal(found.words_NK, expected.words_NK)
    assert torch.equal(found.logs_NK, expected.logs_NK)
    return True


def test_writers_share_a_folder_and_see_each_others_answers(tmp_path):
    first, second = opened(tmp_path / "new"), opened(tmp_path / "new")
    (tmp_path / "new" / "a folder.answers").mkdir()
    first.write(3, text(3), answers(3))
    assert holds(second, 3) and not holds(second, 8)
    second.write(8, text(8), answers(8, tokens=1))
    second.write(2**40, text(1), answers(1, tokens=0))
    assert holds(first, 8, tokens=1)
    reader = opened(tmp_path / "new", **{"the teacher": None})
    assert holds(reader, 3) and len(reader.read(2**40, text(1)).words_NK) == 0
    assert len(list((tmp_path / "new").iterdir())) == 4


def test_what_is_cut_off_or_changed_is_not_there(tmp_path):
    store = opened(tmp_path)
    for sample in range(3):
        store.write(sample, text(sample), answers(sample))
    (path,) = tmp_path.glob("*.answers")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert [holds(opened(tmp_path), sample) for sample in range(3)] == [True, True, False]
    # A byte of the first one's answers, of its text and of its number. Without the magic bytes nothing in
    # the record can be trusted, its length included.
    for byte, others in ((60, True), (20, True), (4, True), (0, False)):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1]) + whole[byte + 1 :])
        assert [holds(opened(tmp_path), sample) for sample in range(3)] == [False, others, others]


def test_a_record_is_found_once_it_is_written_to_its_end(tmp_path):
    reader, writer = opened(tmp_path), opened(tmp_path)
    writer.write(0, text(0), answers(0))
    (path,) = tmp_path.glob("*.answers")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert not holds(reader, 0)
    path.write_bytes(whole)
    assert holds(reader, 0)


def test_of_two_runs_that_begin_a_folder_the_first_one_s_facts_stay(tmp_path, monkeypatch):
    opened(tmp_path)
    # The second run looked before the first one wrote.
    monkeypatch.setattr(Path, "exists", lambda _: False)
    with pytest.raises(ValueError, match="the dictionary was d and is now e"):
        opened(tmp_path, **{"the dictionary": "e"})
    opened(tmp_path)
    assert os.listdir(tmp_path) == ["about.json"]


@pytest.mark.parametrize("damaged", ["0", "f"])
def test_of_two_answers_the_whole_one_is_read(damaged, tmp_path, monkeypatch):
    """In whichever file it is, and whenever it was written."""
    reader = opened(tmp_path)
    for name in "0f":
        monkeypatch.setattr(stored_logits.secrets, "token_hex", lambda _, name=name: name)
        opened(tmp_path).write(0, text(0), answers(0))
        path = tmp_path / f"{name}.answers"
        if name == damaged:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert holds(reader, 0) == (damaged != "0" or name == "f")
    assert holds(reader, 0) and holds(opened(tmp_path), 0)


@pytest.mark.parametrize("other", [{"the dictionary": "e"}, {"the teacher": "u"}, {"--distill-top-k": 4}])
def test_answers_of_something_else_are_refused(other, tmp_path):
    opened(tmp_path)
    (what,) = other
    with pytest.raises(ValueError, match=rf"{what} was .* and is now {other[what]}; give another"):
        opened(tmp_path, **other)


def test_answers_to_another_text_are_refused(tmp_path):
    store = opened(tmp_path)
    store.write(0, text(0), answers(0))
    with pytest.raises(ValueError, match="probabilities of sample 0 are for different text"):
        store.read(0, text(1))


def test_a_folder_without_answers_needs_a_teacher(tmp_path):
    with pytest.raises(ValueError, match="has no stored teacher probabilities; give --distill-teacher"):
        opened(tmp_path, **{"the teacher": None})
    for damaged in ("{", "[" * 200_000, "null"):
        (tmp_path / "about.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"about\.json is damaged"):
            opened(tmp_path)
    (tmp_path / "about.json").unlink()
    os.mkfifo(tmp_path / "about.json")  # nobody writes into it
    with pytest.raises(ValueError, match=r"about\.json is damaged"):
        opened(tmp_path)


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    store = opened(tmp_path)
    monkeypatch.setattr(Path, "open", lambda *_, **__: SimpleNamespace(write=lambda _: 1))
    with pytest.raises(ValueError, match="cannot be written: the disk is full"):
        store.write(0, text(0), answers(0))


def test_a_folder_that_can_not_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written: "):
        opened(tmp_path / "file" / "in")
    assert os.listdir(tmp_path) == ["file"]
