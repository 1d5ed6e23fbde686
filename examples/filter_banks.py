"""Compute log-mel filter banks and manifests for --task speech_to_text, with torch alone.

fairseq's scripts need torchaudio or PyKaldi; this script does not. It writes SPLIT.tsv, config.yaml and one
banks/NAME.npy per sound to OUT.

    python examples/filter_banks.py OUT --split train --text train.txt SOUND.wav …

B mel bins, F frequencies, N frames.
"""

import argparse
import math
import wave
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

WINDOW_S, STEP_S = 0.025, 0.010


def filter_banks(samples: Tensor, rate: int, bins: int) -> Tensor:
    """Return the log energy in `bins` mel bands, for every 10 ms.

    Args:
        samples: one-dimensional tensor of samples from -1 to 1.
        rate: number of samples per second.
        bins: B, the number of mel bands.

    Returns:
        [N, B] float32, with mean 0 and standard deviation 1 in every band.
    """
    window, step = int(WINDOW_S * rate), int(STEP_S * rate)
    size = 1 << (window - 1).bit_length()
    power_FN = (
        torch.stft(samples, size, step, window, torch.hann_window(window), return_complex=True).abs() ** 2
    )
    energy_NB = (_mel_filters(size // 2 + 1, rate, bins) @ power_FN).T
    banks_NB = energy_NB.clamp_min(1e-10).log()
    return (banks_NB - banks_NB.mean(0)) / banks_NB.std(0).clamp_min(1e-5)


def _mel_filters(frequencies: int, rate: int, bins: int) -> Tensor:
    """Return triangular filters [B, F] with equal distances on the mel scale (O'Shaughnessy, 1987)."""
    edges = torch.linspace(0, 2595 * math.log10(1 + rate / 2 / 700), bins + 2)
    edges = 700 * (10 ** (edges / 2595) - 1)
    hertz = torch.linspace(0, rate / 2, frequencies)
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp_min(0)


def read(path: Path) -> tuple[Tensor, int]:
    """Return the samples of a .wav file with 16 bits and one channel, and its sampling rate."""
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        return torch.from_numpy(samples.astype(np.float32) / 32768), file.getframerate()


def main() -> None:
    """Write the filter banks and the manifest of one split."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("sounds", type=Path, nargs="+", help=".wav files of 16 bits, one channel")
    parser.add_argument("--split", required=True, help="train, valid or test")
    parser.add_argument("--text", type=Path, required=True, help="a line for each sound")
    parser.add_argument("--bins", type=int, default=80, help="mel bins (default: 80)")
    arguments = parser.parse_args()
    out, lines = arguments.out, arguments.text.read_text().splitlines()
    # fairseq treats every file of OUT that begins with the split's name as a manifest.
    banks = out / "banks"
    banks.mkdir(parents=True, exist_ok=True)
    rows = ["id\taudio\tn_frames\ttgt_text\tspeaker"]
    for path, line in zip(arguments.sounds, lines, strict=True):
        banks_NB = filter_banks(*read(path), arguments.bins)
        np.save(banks / f"{path.stem}.npy", banks_NB.numpy())
        rows.append(f"{path.stem}\tbanks/{path.stem}.npy\t{len(banks_NB)}\t{line}\tone")
    (out / f"{arguments.split}.tsv").write_text("\n".join(rows) + "\n")
    (out / "config.yaml").write_text(
        f"audio_root: {out.resolve()}\nvocab_filename: dict.txt\ninput_feat_per_channel: {arguments.bins}\n"
    )


if __name__ == "__main__":
    main()
