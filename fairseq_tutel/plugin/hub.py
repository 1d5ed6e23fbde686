"""Defines from_checkpoint(), which opens a trained model in Python with fairseq's hub.

Calling from_checkpoint() imports fairseq; importing this module imports only torch and numpy.
"""

import logging
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.checkpoint.files import checkpoint_in, read_file
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.plugin import register

# The dtypes that an opened model may have.
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float16, torch.float64)


def from_checkpoint(
    path: str | Path,
    data: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """Open a full, sharded or dense checkpoint for inference.

    Args:
        path: a checkpoint file; several files joined by colons (A.pt:B.pt), which form an ensemble; a
            folder that `convert from-hf` wrote; or a --save-dir, whose best checkpoint is opened, or the
            last one if there is no best checkpoint.
        data: the folder with the dictionaries; by default the data folder of the training run, or else the
            folder of the checkpoint.
        device: the device of the model; by default a GPU if there is one.
        dtype: the dtype of the weights. torch.int8 acts as `--moe-inference-dtype int8`: the decoder's
            linear layers are in int8, and all other weights in bf16.
        options: replace saved options of the task, model or run, such as moe_expert_store="pregated" or
            user_dir. The options may also set bpe="sentencepiece" or tokenizer="moses" and options of the
            BPE or tokenizer, whose files are found next to the checkpoint.

    Returns:
        fairseq's hub interface of the model, in eval mode: translation models have `translate`, language
        models `sample` and `score`, RoBERTa and BART `fill_mask` and `predict`, classifiers `classify`.

    Raises:
        ValueError: a file is missing, corrupt or not a checkpoint; a MoE option is unknown; the dtype is
            not one of `DTYPES`; or the model has no interface.
        FileNotFoundError: a dictionary is missing.
        ImportError: fairseq is not installed.

    Example:
        >>> model = ft.from_checkpoint("SAVE", device="cpu")  # the --save-dir of a translation model
        >>> isinstance(model.translate("ein kleiner Hund"), str)
        True
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; give one of {', '.join(map(str, DTYPES))}.")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    handlers, level = [*logging.root.handlers], logging.root.level
    register()
    # Restore the logging setup: fairseq's setup would print Pillow's debug messages about images.
    logging.root.setLevel(level)
    logging.root.handlers[:] = handlers
    from fairseq_tutel.plugin.hub_interfaces import open_interface

    files = files_of(path)
    state = read_file(files[0], "path", verify=False)  # load_checkpoint_to_cpu verifies the file later.
    if not isinstance(state, dict) or not (state.get("cfg") or state.get("args")):
        raise ValueError(f"path names {files[0]}, which contains no model; give a checkpoint.")
    trained = str(SavedModel(state).options_of("task").get("data") or "")
    folder = data_folder(data, trained, files[0].parent)
    return open_interface(files, folder, place, dtype, options)


def files_of(path: str | Path, name: str = "path") -> list[Path]:
    """Return the absolute paths of the checkpoint files that a user's `path` names.

    `checkpoint_in` chooses one of the checkpoints in a folder. Error messages begin with `name`.

    Raises:
        ValueError: a file does not exist, or a folder has no checkpoint.
    """
    files = [checkpoint_in(Path(each).absolute(), name) for each in str(path).split(":")]
    for file in files:
        if not file.exists():
            raise ValueError(f"{name} names {file}, which does not exist; give an existing file.")
    return files


def data_folder(given: str | Path | None, trained: str, beside: Path) -> Path:
    """Return the folder with the dictionaries: the user's `given`, else `trained`, else `beside`.

    `trained` lists the data folders of the training run, joined by `:`. The first of these folders is used
    if it has dictionaries. `beside` is the folder of the checkpoint.
    """
    if given is not None:
        if not Path(given).is_dir():
            raise ValueError(f"data is {given}, which is not a folder; give the dictionaries' folder.")
        return Path(given).absolute()
    folder = Path(trained.split(":")[0]).absolute()
    # Tasks that classify texts have their dictionaries in the folders input0 and label.
    found = trained and any([*folder.glob("dict*.txt"), *folder.glob("*/dict.txt")])
    return folder if found else beside
