"""Errors of stock fairseq that users cause end a command with one sentence."""

import gc
import sys

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, audio, data_utils, indexed_dataset
from fairseq.data.audio import audio_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel
from fairseq.sequence_generator import SequenceGenerator
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
    assert said.startswith(f"error: the data file {tmp_path}/valid.bin is empty; run fairseq-pre")
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


class Undecided(FairseqIncrementalDecoder):
    def max_positions(self):
        return 8

    def forward(self, prev_output_tokens, **kwargs):
        return torch.full((*prev_output_tokens.shape, len(self.dictionary)), torch.nan), {"attn": None}


def test_a_model_without_a_finite_score_is_named():
    words = Dictionary()
    words.add_symbol("a")
    search = SequenceGenerator([FairseqLanguageModel(Undecided(words))], words, beam_size=1)
    said = sentence(lambda: search({"net_input": {"src_tokens": torch.tensor([[4, 4]])}}))
    assert said.startswith(
        "error: the model gives no word a finite score, for example because its weights are NaN; give"
    )


def test_a_module_that_fairseq_lacks_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    wanted = "error: fairseq needs the module soundfile, which is not installed; run `pip install s"
    assert sentence(lambda: audio_utils.get_waveform("a.flac")).startswith(wanted)

    def of_a_worker():
        raise ModuleNotFoundError(
            f"Caught it in a worker. File \"{audio.__file__}\"\nNo module named 'soundfile'"
        )

    assert sentence(of_a_worker).startswith(wanted)


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
