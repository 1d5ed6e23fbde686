"""Errors of stock fairseq that users cause end a command with one sentence."""

import gc

import numpy as np
import pytest
import torch
from fairseq.data import data_utils, indexed_dataset
from fairseq.data.iterators import EpochBatchIterator
from omegaconf import OmegaConf
from torch.utils.data import TensorDataset

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.registration.process import refusals_are_sentences

register()


def sentence(call):
    """Return the error with which a command ends that calls this."""
    with pytest.raises(SystemExit) as end, refusals_are_sentences():
        call()
    return end.value.code


def test_an_empty_text_is_named(tmp_path, capsys):
    builder = indexed_dataset.MMapIndexedDatasetBuilder(f"{tmp_path}/valid.bin", dtype=np.uint16)
    builder.finalize(f"{tmp_path}/valid.idx")
    said = sentence(lambda: data_utils.load_indexed_dataset(f"{tmp_path}/valid", None))
    assert said.startswith(f"error: data has {tmp_path}/valid.bin, which is empty; run fairseq-pre")
    gc.collect()
    assert "_bin_buffer_mmap" not in capsys.readouterr().err


@pytest.mark.parametrize("multiple", [1, 8])
def test_data_without_a_batch_is_refused_by_the_options_that_leave_none(multiple):
    cfg = OmegaConf.create({"dataset": {"max_tokens": 10, "required_batch_size_multiple": multiple}})

    def main(cfg):
        batches = data_utils.batch_by_size(
            np.arange(0), lambda i: 64, required_batch_size_multiple=multiple
        )
        EpochBatchIterator(TensorDataset(torch.zeros(0)), None, batches).first_batch  # noqa: B018

    said = sentence(lambda: main(cfg))
    given = f"--max-tokens is 10, --required-batch-size-multiple is {multiple}: every example is longer"
    assert said.startswith(f"error: no batch fits {given} than --max-tokens, or there are fewer")


def test_other_errors_keep_their_traceback():
    for error in (IndexError(3), ModuleNotFoundError("No module named 'mine'"), Exception("x")):
        with pytest.raises(type(error)), refusals_are_sentences():
            raise error


def test_a_checkpoint_that_fits_no_model_is_named():
    def load_checkpoint(filename):
        torch.nn.Linear(2, 2).load_state_dict({"weight": torch.zeros(3, 3)})

    said = sentence(lambda: load_checkpoint("x.pt"))
    assert said.startswith("error: x.pt does not fit this command's model, data or options (Run")
    assert "size mismatch for weight" in said and "\n" not in said

    def load_dataset():
        raise TypeError("of the data")

    def load_checkpoint(filename):  # noqa: F811
        load_dataset()

    with pytest.raises(TypeError, match="of the data"), refusals_are_sentences():
        load_checkpoint("x.pt")
