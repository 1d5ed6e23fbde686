"""Speech that a tiny model can learn: every letter is a tone, and the text lists the letters."""

import importlib.util
import math
import sys
import wave
from unittest import mock

import numpy as np
from cli import ROOT

RATE = 16000
LETTERS = "abcdef"
STEPS_A_LETTER = 4  # frames of 20 ms, as in wav2vec2 and for labels


def tones(folder):
    """Write utterances of 2 to 5 letters, and lists of them; return the folder.

    For each split, SPLIT.tsv is fairseq's manifest, SPLIT.ltr has the text, and SPLIT.km has one label per
    frame. The sounds are in a subfolder, because fairseq would treat their names as those of splits.
    """
    (folder / "wav").mkdir(parents=True)
    for name in ("ltr", "km"):
        (folder / f"dict.{name}.txt").write_text("".join(f"{of} 1\n" for of in LETTERS))
    for split, count in (("train", 24), ("valid", 6)):
        rng, manifest, texts, frames = np.random.default_rng(count), [str(folder / "wav")], [], []
        for i in range(count):
            letters = rng.integers(len(LETTERS), size=rng.integers(2, 6))
            path = folder / "wav" / f"{split}{i:02}.wav"
            size = _play(path, letters, rng)
            manifest.append(f"{path.name}\t{size}")
            texts.append(" ".join(LETTERS[of] for of in letters))
            frames.append(" ".join(LETTERS[of] for of in letters for _ in range(STEPS_A_LETTER)))
        for ending, lines in {"tsv": manifest, "ltr": texts, "km": frames}.items():
            (folder / f"{split}.{ending}").write_text("\n".join(lines) + "\n")
    return folder


def banks(sounds, folder):
    """Write the filter banks of these sounds with examples/filter_banks.py; return the folder."""
    spec = importlib.util.spec_from_file_location("banks", ROOT / "examples" / "filter_banks.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for split in ("train", "valid"):
        paths = sorted((sounds / "wav").glob(f"{split}*.wav"))
        words = [folder, *paths, "--split", split, "--text", sounds / f"{split}.ltr", "--bins", 16]
        with mock.patch.object(sys, "argv", ["filter_banks.py", *map(str, words)]):
            script.main()
    (folder / "dict.txt").write_text((sounds / "dict.ltr.txt").read_text())
    return folder


def _play(path, letters, rng):
    """Write a .wav file with a tone for each letter; return its number of samples."""
    time = np.arange(int(0.02 * STEPS_A_LETTER * RATE)) / RATE
    wave_of = [np.sin(2 * math.pi * (300 + 250 * of) * time) for of in letters]
    samples = np.concatenate(wave_of) * 0.5 + rng.normal(scale=0.01, size=len(time) * len(letters))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return len(samples)
