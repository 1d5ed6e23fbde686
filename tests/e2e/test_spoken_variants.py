"""MoE variants of models for speech, units and masked words train through the stock commands."""

import csv
import json

import numpy as np
import pytest
import torch
from cli import fairseq
from equality import learns
from models import COMMON, EXPERTS, SOUND_DIR
from sounds import LETTERS, banks, tones

SIZES = (
    "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 2,
    "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 32, "--decoder-attention-heads", 2,
    "--dropout", 0, *EXPERTS,
)  # fmt: skip
HEARS = ("--encoder-layers", 2, "--conv-channels", 16)
CONFORMER = ("--depthwise-conv-kernel-size", 3)
SPEAKS = (
    "--prenet-dim", 16, "--prenet-dropout", 0, "--postnet-conv-dim", 16, "--postnet-dropout", 0,
    "--output-frame-dim", 16, "--decoder-transformer-layers", 2,
)  # fmt: skip
READS = ("--encoder-transformer-layers", 2, "--encoder-conv-layers", 1)
IN_UNITS = ("--target-is-code", "--target-code-size", len(LETTERS), "--vocoder", "code_hifigan")
# The task, its options, the criterion, and the model's options.
SPOKEN = {
    "s2ut_transformer": (
        "speech_to_speech", IN_UNITS, "speech_to_unit", (*HEARS, "--decoder-layers", 2),
    ),
    "s2ut_conformer": (
        "speech_to_speech", IN_UNITS, "speech_to_unit", (*HEARS, *CONFORMER, "--decoder-layers", 2),
    ),
    "s2spect_transformer": ("speech_to_speech", (), "speech_to_spectrogram", (*HEARS, *SPEAKS)),
    "s2spect_conformer": (
        "speech_to_speech", (), "speech_to_spectrogram", (*HEARS, *CONFORMER, *SPEAKS),
    ),
    "tts_transformer": ("text_to_speech", (), "tacotron2", (*READS, *SPEAKS)),
}  # fmt: skip


def _add_targets(folder, in_units):
    """Add to lists of filter banks what is said: the banks themselves, or a unit a letter."""
    for split in ("train", "valid"):
        path = folder / f"{split}.tsv"
        with path.open() as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        for row in rows:
            audio, frames, text = row["audio"], row["n_frames"], row["tgt_text"]
            units = [str(LETTERS.index(letter)) for letter in text.split()]
            target = (" ".join(units), len(units)) if in_units else (audio, frames)
            row |= {"src_audio": audio, "src_n_frames": frames, "src_text": text}
            row |= dict(zip(("tgt_audio", "tgt_n_frames"), target, strict=True))
        with path.open("w") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t")
            writer.writeheader()
            writer.writerows(rows)
    with (folder / "config.yaml").open("a") as file:
        file.write("features: {sample_rate: 16000}\n")


def _is_used(data, run, folder, *words):
    """Assert that fairseq-validate says of the checkpoint what its training said."""
    found = fairseq(
        "validate", data, "--user-dir", SOUND_DIR, *words, "--path", folder / "checkpoint_last.pt",
        "--log-format", "json", "--required-batch-size-multiple", 1, "--batch-size", 4,
    ).stats("valid")[-1]  # fmt: skip
    expected = float(run.stats("valid")[-1]["valid_loss"])
    # What writes spectrograms drops a part of what it wrote last in evaluation too.
    assert float(found["valid_loss"]) == pytest.approx(expected, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("kind", SPOKEN)
def test_what_speaks(kind, tmp_path):
    name, of_task, criterion, of_model = SPOKEN[kind]
    data = banks(tones(tmp_path / "sounds"), tmp_path / "banks")
    _add_targets(data, in_units=bool(of_task))
    task = ("--task", f"moe_{name}", *of_task)
    words = ("--arch", f"moe_{kind}", "--criterion", f"moe_{criterion}", *SIZES, *of_model)
    words = (*task, *words, "--max-update", 6, "--save-dir", tmp_path)
    run = fairseq("train", data, *COMMON, *words, ranks=2)
    learns(run)
    _is_used(data, run, tmp_path, *task)
    if of_task:
        output = fairseq(
            "generate", data, "--user-dir", SOUND_DIR, *task, "--gen-subset", "valid", "--path",
            tmp_path / "checkpoint_last.pt", "--required-batch-size-multiple", 1,
        ).output  # fmt: skip
        assert output.count("\nH-") == 6


@pytest.mark.long
def test_units_with_lengths_and_pitch(tmp_path):
    sounds = tones(tmp_path / "sounds")
    for split in ("train", "valid"):
        lines = (sounds / f"{split}.ltr").read_text().splitlines()
        lengths = [len(line.split()) for line in lines]
        units = np.array([LETTERS.index(of) for line in lines for of in line.split()])
        of = {"code": units, "dur": 1 + units % 3, "f0": 100.0 + units}
        for ending, values in of.items():
            np.save(tmp_path / f"{split}.{ending}.npy", values)
        torch.save({"f0_mean": 102.0, "f0_std": 1.0}, tmp_path / f"{split}.f0_stat.pt")
        (tmp_path / f"{split}.leng.txt").write_text("".join(f"{n}\n" for n in lengths))
        (tmp_path / f"{split}.path.txt").write_text("-\n" * len(lengths))
    data = tmp_path / "data.json"
    config = {"n_units": len(LETTERS), "sampling_rate": 16000, "code_hop_size": 320}
    config["manifests"] = {split: str(tmp_path / split) for split in ("train", "valid")}
    data.write_text(json.dumps(config))
    task = ("--task", "moe_speech_unit_modeling", "--normalize-f0-mean")
    words = (
        *task, "--arch", "moe_transformer_ulm", "--criterion", "moe_speech_unit_lm_criterion",
        "--loss-weights", "1;0.1;0.1", "--decoder-layers", 2, "--decoder-input-dim", 16,
        "--decoder-output-dim", 16, *SIZES[6:], "--max-update", 6, "--save-dir", tmp_path,
        "--ignore-unused-valid-subsets",
    )  # fmt: skip
    run = fairseq("train", data, *COMMON, *words, ranks=2)
    learns(run)
    _is_used(data, run, tmp_path, *task)


@pytest.mark.long
def test_masked_words(lm_data, tmp_path):
    """By the task of roberta: stock's own for bert, legacy_masked_lm, cannot read its dictionary."""
    task = ("--task", "moe_masked_lm", "--tokens-per-sample", 32)
    words = (
        *task, "--arch", "moe_bert_base", "--criterion", "moe_masked_lm", "--encoder-layers", 2,
        *SIZES[:6], *EXPERTS, "--max-update", 9, "--save-dir", tmp_path,
    )  # fmt: skip
    run = fairseq("train", lm_data, *COMMON, *words, ranks=2)
    learns(run)
    _is_used(lm_data, run, tmp_path, *task)
