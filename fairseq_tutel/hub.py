"""from_checkpoint(): a trained model in Python, as fairseq's hub gives it, with or without experts.

fairseq is imported when it is called; importing this needs torch and numpy alone.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.checkpoint.reading import read_file
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.plugin import register

# In a --save-dir, the first that is there.
USUAL = ("checkpoint_best.pt", "checkpoint_last.pt")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DICTIONARIES = "dict*.txt"


def from_checkpoint(
    path: str | Path,
    data: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """Open a checkpoint for use: one file, one whose experts are in shards beside it, or a dense one.

    Args:
        path: of the file, of several as --path takes them (A.pt:B.pt, an ensemble), or of a --save-dir,
            whose best checkpoint is taken, else the last.
        data: folder with the dictionaries; by default the one of the training, else the checkpoint's own.
        device: by default a GPU where there is one.
        dtype: of the weights: torch.float32, float16 or bfloat16.
        options: of the task, the model or the run in place of those that were saved, without dashes:
            moe_expert_store="pregated", source_lang="de"; bpe="sentencepiece" or tokenizer="moses" with
            their own, of which files beside the checkpoint are found as in fairseq's hub; user_dir.

    Returns:
        One of plugin/hub_interfaces.py, a torch module in eval mode. Of a translation model it has
        `translate`, of a language model `sample` and `score`, of a masked one `fill_mask`, of one of
        images `classify`; what else fairseq's own interfaces have, it has too.

    Raises:
        ValueError: a file that is missing, torn or of another kind, no dictionaries, an unknown option, or
            a model of which there is no interface.
        ImportError: fairseq is not installed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; give one of {', '.join(map(str, DTYPES))}.")
    on_gpu = torch.cuda.is_available()
    try:
        place = torch.device(device or ("cuda" if on_gpu else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"device is {device}, which torch has not; give cpu or cuda.") from error
    if place.type == "cuda" and not on_gpu:
        raise ValueError(f"device is {device}, and torch finds no GPU here; leave it out.")
    handlers, level = [*logging.root.handlers], logging.root.level
    register()
    # A module of fairseq's lets all that is logged be printed, Pillow's lines of every image too.
    logging.root.setLevel(level)
    for handler in {*logging.root.handlers}.difference(handlers):
        logging.root.removeHandler(handler)
    from fairseq_tutel.plugin.hub_opening import open_interface

    files = _files(str(path))
    state = read_file(files[0], "path", verify=False)  # fairseq's load, wrapped, verifies it later
    if not isinstance(state, dict) or not (state.get("cfg") or state.get("args")):
        raise ValueError(f"path names {files[0]}, which holds no model; give a checkpoint.")
    saved = SavedModel(state)
    usual: list[str | Path] = [str(saved.options_of("task").get("data") or ""), files[0].parent]
    folder = _data_folder(data, usual)
    return open_interface(files, folder, place, dtype, options, saved.all_keys)


def _files(path: str) -> list[Path]:
    """Return the absolute paths of the files that are meant."""
    files = [Path(name).absolute() for name in path.split(":")]
    for i, file in enumerate(files):
        found = [file / name for name in USUAL if (file / name).is_file()]
        if file.is_dir() and not found:
            raise ValueError(f"path names {file}, a folder without {' or '.join(USUAL)}.")
        files[i] = found[0] if found else file
    return files


def _data_folder(given: str | Path | None, usual: Iterable[str | Path]) -> Path:
    """Return the folder of the dictionaries; of models without any, the last of the usual ones.

    Raises:
        ValueError: the given one is none.
    """
    if given is not None:
        if not Path(given).is_dir():
            raise ValueError(f"data is {given}, which is no folder; name that of the dictionaries.")
        return Path(given).absolute()
    # Data of several folders has its dictionaries in the first.
    folders = [Path(str(name).split(":")[0]).absolute() for name in usual if name]
    return next((f for f in folders if any(f.glob(DICTIONARIES))), folders[-1])
