"""Errors of this package and some errors of fairseq end a command with one sentence."""

import re
import traceback

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils, indexed_dataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import TensorDataset

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.registration.flags import refuse_misspelt
from fairseq_tutel.plugin.registration.process import refusals_are_sentences, run_as_spawned

register()


def sentence(call):
    """Return the error line that a command prints for the error of `call`."""
    with pytest.raises(SystemExit) as end, refusals_are_sentences():
        call()
    return end.value.code


def read_empty_text(folder):
    builder = indexed_dataset.MMapIndexedDatasetBuilder(f"{folder}/valid.bin", dtype=np.uint16)
    builder.finalize(f"{folder}/valid.idx")
    data_utils.load_indexed_dataset(f"{folder}/valid", None)


def iterate_without_batches(folder):
    EpochBatchIterator(TensorDataset(torch.zeros(0)), None, []).first_batch  # noqa: B018


def open_without_dictionary(folder):
    LanguageModelingTask.setup_task(LanguageModelingConfig(data=str(folder), tokens_per_sample=4))


def open_without_split(folder):
    (folder / "dict.txt").write_text("a 1\n")
    config = LanguageModelingConfig(data=str(folder), tokens_per_sample=4)
    LanguageModelingTask.setup_task(config).load_dataset("valid")


def load_into_another_model(folder):
    """Load a state dict with wrong shapes, and raise the error that fairseq's Trainer raises."""
    try:
        torch.nn.Linear(2, 2).load_state_dict({"weight": torch.zeros(3, 3)})
    except Exception:
        text = (
            "Cannot load model parameters from checkpoint x.pt; please ensure that the architectures match."
        )
        raise Exception(text)  # noqa: B904


EXPLAINED = [
    (read_empty_text, "there is no batch"),
    (iterate_without_batches, "--max-tokens"),
    (open_without_dictionary, r"/dict\.txt does not exist"),
    (open_without_split, r"no split valid \("),
    (lambda folder: TranslationTask.setup_task(TranslationConfig(data=str(folder))), "--source-lang"),
    (lambda _: checkpoint_utils.load_model_ensemble_and_task(["none.pt"]), "--path is none.pt"),
    (load_into_another_model, r"x\.pt does not fit this model \(.*size mismatch for weight.*vocabulary"),
    (lambda _: torch.empty(2**60), "--max-tokens"),
]


# If fairseq cannot open an empty data set, the __del__ of this data set fails too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("call", "words"), EXPLAINED, ids=[words for _, words in EXPLAINED])
def test_common_errors_of_fairseq_end_a_command_with_one_sentence(call, words, tmp_path):
    said = sentence(lambda: call(tmp_path))
    assert re.match(f"error: .*{words}", said) and "\n" not in said


def test_unknown_errors_keep_their_traceback():
    for error in (IndexError(3), ModuleNotFoundError("No module named 'mine'"), ValueError("x")):
        with pytest.raises(type(error)), refusals_are_sentences():
            raise error


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit("error: done."), KeyError("bug")], ids=repr)
def test_a_command_ends_with_the_error_sentence_of_its_spawned_rank(error):
    """If a spawned rank fails, torch raises an error that has the traceback of the rank as text."""

    def main():
        if isinstance(error, ValueError):
            refuse_misspelt({"moe_topk": 1})
        raise error

    try:
        run_as_spawned(main)
    except Exception:
        text = traceback.format_exc()

    def parent():
        raise ProcessRaisedException(f"\n\n-- Process 0 terminated with the following error:\n{text}", 0, 1)

    if isinstance(error, KeyError):
        with pytest.raises(ProcessRaisedException), refusals_are_sentences():
            parent()
        return
    assert re.match("error: done.$|error: moe_topk .* moe_top_k", sentence(parent))


def test_the_error_summary_of_torchrun_has_the_error_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    said = sentence(lambda: refuse_misspelt({"moe_topk": 1}))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert f"traceback : {said}\n" in str(ChildFailedError("train", {0: failure}))
