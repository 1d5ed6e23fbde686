"""MoE variants of models that output speech train through fairseq's commands."""

import csv

import pytest
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
# Each architecture has a task, options of the task, a criterion, and options of the model.
SPOKEN = {
    "s2ut_transformer": (
        "speech_to_speech", IN_UNITS, "speech_to_unit", (*HEARS, "--decoder-layers", 2),
    ),
    "s2spect_conformer": (
        "speech_to_speech", (), "speech_to_spectrogram", (*HEARS, *CONFORMER, *SPEAKS),
    ),
    "tts_transformer": ("text_to_speech", (), "tacotron2", (*READS, *SPEAKS)),
}  # fmt: skip


def _add_targets(folder, in_units):
    """Add a target to each row of fairseq's lists: one unit per letter, or the input's filter banks."""
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


@pytest.mark.long
@pytest.mark.parametrize("kind", SPOKEN)
def test_models_that_output_speech_train_on_two_ranks_and_are_validated(kind, tmp_path):
    name, of_task, criterion, of_model = SPOKEN[kind]
    data = banks(tones(tmp_path / "sounds"), tmp_path / "banks")
    _add_targets(data, in_units=bool(of_task))
    task = ("--task", f"moe_{name}", *of_task)
    words = ("--arch", f"moe_{kind}", "--criterion", f"moe_{criterion}", *SIZES, *of_model)
    words = (*task, *words, "--max-update", 6, "--save-dir", tmp_path)
    run = fairseq("train", data, *COMMON, *words, ranks=2)
    learns(run)
    found = fairseq(
        "validate", data, "--user-dir", SOUND_DIR, *task, "--path", tmp_path / "checkpoint_last.pt",
        "--log-format", "json", "--required-batch-size-multiple", 1, "--batch-size", 4,
    ).stats("valid")[-1]  # fmt: skip
    expected = float(run.stats("valid")[-1]["valid_loss"])
    # The two losses differ a little, because the two training ranks have different batch norms.
    assert float(found["valid_loss"]) == pytest.approx(expected, rel=0.02)
    if of_task:
        output = fairseq(
            "generate", data, "--user-dir", SOUND_DIR, *task, "--gen-subset", "valid", "--path",
            tmp_path / "checkpoint_last.pt", "--required-batch-size-multiple", 1,
        ).output  # fmt: skip
        assert output.count("\nH-") == 6
