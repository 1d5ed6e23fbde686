"""Errors of stock fairseq that users cause end a command with one sentence."""

import gc
import sys
import traceback

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, audio, data_utils, indexed_dataset
from fairseq.data.audio import audio_utils
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from fairseq.data.iterators import EpochBatchIterator
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import TensorDataset

from fairseq_tutel.checkpoint import atomic_save
from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.registration.flags import refuse_misspelt
from fairseq_tutel.plugin.registration.process import refusals_are_sentences, run_as_spawned

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


def test_a_missing_file_of_a_bpe_is_named():
    bpe = OmegaConf.structured(SentencepieceConfig(sentencepiece_model="nowhere.model"))
    said = sentence(lambda: SentencepieceBPE(bpe))
    assert said.startswith("error: nowhere.model does not exist, but --bpe or --tokenizer needs it; give")


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


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    said = sentence(lambda: atomic_save.save({}, f"{tmp_path}/none/a.pt"))
    assert said.startswith(f"error: {tmp_path}/none/a.pt could not be written: No such")


def test_a_save_dir_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "save").write_text("a file")
    said = sentence(lambda: checkpoint_utils.verify_checkpoint_directory(f"{tmp_path}/save"))
    assert said.startswith(f"error: --save-dir is {tmp_path}/save, in which no file can be written (Not a")


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


MISSING = [
    ("dict.txt", lambda folder: None, "the data file {0}/dict.txt does not exist; give a folder with"),
    ("split", lambda folder: (folder / "dict.txt").write_text("a 1\n"), "the data folder has no split val"),
]


@pytest.mark.parametrize(("missing", "prepare", "wanted"), MISSING, ids=[each[0] for each in MISSING])
def test_missing_data_is_named(missing, prepare, wanted, tmp_path):
    prepare(tmp_path)
    cfg = LanguageModelingConfig(data=str(tmp_path), tokens_per_sample=4)

    def main():
        LanguageModelingTask.setup_task(cfg).load_dataset("valid")

    assert sentence(main).startswith(f"error: {wanted.format(tmp_path)}")


def test_a_folder_without_languages_is_named(tmp_path):
    cfg = TranslationConfig(data=str(tmp_path))
    said = sentence(lambda: TranslationTask.setup_task(cfg))
    assert said.startswith("error: the data folder has no file train.SRC-TGT…, from which fairseq infers")


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit("error: done."), KeyError("bug")], ids=repr)
def test_a_spawned_rank_s_sentence_ends_the_command(error):
    """As torch does: the process that spawned a rank raises an error with the text of its traceback."""

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
    wanted = "error: --model-overrides has 'moe_topk', which is not an option; did you mean 'moe_top_k'?"
    assert sentence(parent) == (wanted if isinstance(error, ValueError) else "error: done.")


def test_torchrun_s_summary_has_the_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    said = sentence(lambda: refuse_misspelt({"moe_topk": 1}))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert f"traceback : {said}\n" in str(ChildFailedError("train", {0: failure}))
