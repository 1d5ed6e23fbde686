"""MoE variants of speech and non-autoregressive models train and run in fairseq's commands."""

from functools import cache

import pytest
import torch
from cli import fairseq
from equality import learns, same_training
from models import COMMON, EXPERTS, SOUND_DIR, mt_args
from sounds import banks, tones

# Convolutions of wav2vec2 that give one frame per 20 ms of audio.
CONVOLUTIONS = "[(16, 10, 5)] + [(16, 8, 8)] * 2"
WAVES = (
    "--conv-feature-layers", CONVOLUTIONS, "--encoder-layers", 2, "--encoder-embed-dim", 16,
    "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 2, "--conv-pos", 8,
    "--conv-pos-groups", 2, "--mask-length", 2, "--mask-prob", 0.4, "--dropout", 0,
    "--attention-dropout", 0, "--final-dim", 16, *EXPERTS,
)  # fmt: skip
PRETRAINED = {
    "wav2vec2": (
        "--task", "moe_audio_pretraining", "--arch", "moe_wav2vec2", "--criterion", "moe_wav2vec",
        "--enable-padding", "--num-negatives", 4, "--quantize-targets", "--latent-vars", 8, "--infonce",
    ),
    "hubert": (
        "--task", "moe_hubert_pretraining", "--arch", "moe_hubert", "--criterion", "moe_hubert",
        "--labels", '["km"]', "--label-rate", 50, "--pad-audio", "--random-crop",
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def sound_data(tmp_path_factory):
    """The folder with the sound files that all tests share."""
    return tones(tmp_path_factory.mktemp("sounds") / "of")


def _pretrain(kind, data, folder, *extra, updates=2, **kwargs):
    words = (*PRETRAINED[kind], *WAVES, "--max-update", updates, "--save-dir", folder, *extra)
    return fairseq("train", data, *COMMON, *words, **kwargs)


def one_quick(kinds):
    """Return test parameters, of which `make test` runs only the first."""
    first, *others = kinds
    return first, *(pytest.param(kind, marks=pytest.mark.long) for kind in others)


def _load(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


@pytest.mark.long
@pytest.mark.parametrize("kind", PRETRAINED)
def test_a_pretrained_speech_model_learns_and_resumes_on_two_ranks(kind, sound_data, tmp_path):
    learns(_pretrain(kind, sound_data, tmp_path, updates=60))
    extra = ("--checkpoint-activations", "--max-update", 62)
    resumed = _pretrain(kind, sound_data, tmp_path, *extra, ranks=2)
    assert "expert parallel size 2" in resumed.output
    assert len(resumed.stats("train_inner")) == 2


DECODER = (
    "--decoder-layers", 1, "--decoder-ffn-embed-dim", 32, "--decoder-attention-heads", 2,
    "--criterion", "moe_cross_entropy",
)  # fmt: skip
WRITES = ("--task", "moe_audio_finetuning", "--labels", "ltr", "--autoregressive")
CTC = ("--criterion", "moe_ctc", "--post-process", "letter")
# Each architecture has a pretrained model, options of the task, and options of the model.
FINE_TUNED = {
    "wav2vec_seq2seq": ("wav2vec2", WRITES, (*DECODER, "--decoder-embed-dim", 512)),
    "hubert_ctc": (
        "hubert",
        (
            "--task", "moe_hubert_pretraining", "--labels", '["ltr"]', "--fine-tuning",
            "--single-target", "--label-rate", -1, "--pad-audio", "--random-crop",
        ),
        CTC,
    ),
}  # fmt: skip


def _fine_tune(kind, data, pretrained, folder, *extra, updates=6, **kwargs):
    words = (
        *FINE_TUNED[kind][1], *FINE_TUNED[kind][2], "--arch", f"moe_{kind}", "--w2v-path", pretrained,
        "--feature-grad-mult", 1, "--max-update", updates, "--save-dir", folder, *extra,
    )  # fmt: skip
    return fairseq("train", data, *COMMON, *words, **kwargs)


@pytest.fixture(scope="module")
def pretrained(sound_data, tmp_path_factory):
    """Return a function that returns the checkpoint of a small pretrained model of the given kind."""

    @cache
    def path_of(kind):
        folder = tmp_path_factory.mktemp(kind)
        _pretrain(kind, sound_data, folder, "--moe-top-k", 1)
        return folder / "checkpoint_last.pt"

    return path_of


@pytest.mark.long
@pytest.mark.parametrize("kind", FINE_TUNED)
def test_a_pretrained_speech_model_with_experts_is_fine_tuned(kind, sound_data, pretrained, tmp_path):
    path = pretrained(FINE_TUNED[kind][0])
    _fine_tune(kind, sound_data, path, tmp_path / "still", "--lr", 0.0, updates=1)
    before = torch.load(path, weights_only=False)["model"]
    after = {name.partition("w2v_model.")[2]: v for name, v in _load(tmp_path / "still")["model"].items()}
    experts = [name for name in before if ".fc1." in name]
    assert len(experts) > 8
    assert all(torch.equal(before[name], after[name]) for name in experts)
    sgd = ("--optimizer", "moe_sgd", "--lr", 0.1)
    for ranks in (1, 2):
        run = _fine_tune(
            kind, sound_data, path, tmp_path / str(ranks), *sgd, "--update-freq", 2 // ranks, ranks=ranks
        )
        learns(run)
    assert "expert parallel size 2" in run.output
    same_training(tmp_path / "1", tmp_path / "2")
    output = fairseq(
        "validate", sound_data, "--user-dir", SOUND_DIR, *FINE_TUNED[kind][1], "--path",
        tmp_path / "2" / "checkpoint_last.pt", "--batch-size", 4, "--log-format", "json",
        "--required-batch-size-multiple", 1,
    )  # fmt: skip
    (found,), (*_, expected) = output.stats("valid"), run.stats("valid")
    assert float(found["valid_loss"]) == pytest.approx(float(expected["valid_loss"]), rel=0.02)


BANKS = (
    "--max-tokens", 4000, "--encoder-layers", 2, "--decoder-layers", 2, "--encoder-embed-dim", 16,
    "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 2, "--decoder-embed-dim", 16,
    "--decoder-ffn-embed-dim", 32, "--decoder-attention-heads", 2, "--dropout", 0, *EXPERTS,
)  # fmt: skip
OF_BANKS = {
    "s2t_transformer": ("--conv-channels", 16),
    "s2t_conformer": ("--conv-channels", 16, "--depthwise-conv-kernel-size", 3),
}


@pytest.mark.parametrize("kind", one_quick(OF_BANKS))
def test_a_speech_to_text_model_learns_on_two_ranks_and_generates(kind, sound_data, tmp_path):
    data = banks(sound_data, tmp_path / "banks")
    words = (
        "--task", "moe_speech_to_text", "--arch", f"moe_{kind}", "--criterion",
        "moe_label_smoothed_cross_entropy", *BANKS, *OF_BANKS[kind], "--max-update", 6,
        "--optimizer", "moe_sgd", "--lr", 0.1,
    )  # fmt: skip
    for ranks in (1, 2):
        folder = ("--save-dir", tmp_path / str(ranks), "--update-freq", 2 // ranks)
        run = fairseq("train", data, *COMMON, *words, *folder, ranks=ranks)
        learns(run)
    if "conformer" not in kind:  # a conformer's batch norms differ between 1 and 2 ranks
        same_training(tmp_path / "1", tmp_path / "2")
    output = fairseq(
        "generate", data, "--user-dir", SOUND_DIR, "--task", "moe_speech_to_text", "--gen-subset",
        "valid", "--path", tmp_path / "2" / "checkpoint_last.pt", "--max-tokens", 4000,
        "--required-batch-size-multiple", 1,
    )  # fmt: skip
    assert output.output.count("\nH-") == 6


LEVENSHTEIN = ("--task", "moe_translation_lev", "--criterion", "moe_nat_loss")
NOT_AUTOREGRESSIVE = {
    "nonautoregressive_transformer": ("--noise", "full_mask"),
    "levenshtein_transformer": ("--noise", "random_delete"),
    "insertion_transformer": ("--noise", "random_delete"),
}


@pytest.mark.parametrize("kind", one_quick(NOT_AUTOREGRESSIVE))
def test_a_nonautoregressive_model_learns_on_two_ranks_and_generates(kind, mt_data, tmp_path):
    words = (*LEVENSHTEIN, "--arch", f"moe_{kind}", *NOT_AUTOREGRESSIVE[kind])
    words = (*words, "--optimizer", "moe_sgd", "--lr", 0.1)
    for ranks in (1, 2):
        args = mt_args(mt_data, tmp_path / str(ranks), *words, "--update-freq", 2 // ranks)
        run = fairseq("train", *args, ranks=ranks)
        learns(run)
    if "full_mask" in words and kind.startswith("non"):  # random_delete noise differs between 1 and 2 ranks
        same_training(tmp_path / "1", tmp_path / "2")
    output = fairseq(
        "generate", mt_data, "--user-dir", SOUND_DIR, "--task", "moe_translation_lev", "--path",
        tmp_path / "2" / "checkpoint_last.pt", "--iter-decode-max-iter", 2, "--iter-decode-eos-penalty", 0,
        "--beam", 1, "--batch-size", 8, "--required-batch-size-multiple", 1,
    )  # fmt: skip
    assert output.output.count("\nH-") == 21
