"""convert members: write each member of an ensemble as a checkpoint of its own.

They are what a training of one such model writes: fairseq-generate averages their probabilities again, as
--path FOLDER/member0.pt:FOLDER/member1.pt:…. Stock fairseq opens them where their architecture is its own.
"""

import argparse
import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

from fairseq_tutel import plugin
from fairseq_tutel.ensemble.options import CMCLConfig, EnsembleConfig
from fairseq_tutel.moe.config import options_of as options_of_experts
from fairseq_tutel.moe.options import options_in
from fairseq_tutel.tools.arguments import add_files, refuse_output
from fairseq_tutel.checkpoint.reading import begun_anew, load, write_all
from fairseq_tutel.convert.names import (
    PARTS,
    drop,
    model_options,
    name_of,
    options_of,
    rename,
)

NAME = "ensemble_of"


def add_to(kinds: Any) -> None:
    """Add the conversion to the command line."""
    parser = kinds.add_parser(
        "members", help="write each member of an ensemble as a checkpoint", description=__doc__
    )
    add_files(parser, "a checkpoint of --arch ensemble_of", "the folder to write into", "FOLDER")
    parser.set_defaults(convert=convert)


def convert(arguments: argparse.Namespace) -> None:
    """Convert as the command line says."""
    source, folder = Path(arguments.input), Path(arguments.output)
    state = load(source, "--input")
    if name_of(state, "model") != NAME:
        raise ValueError(
            f"--input names {source}, a checkpoint of {name_of(state, 'model') or 'nothing known'}; give "
            f"one of --arch {NAME}."
        )
    if (folder.exists() and not folder.is_dir()) or not folder.parent.is_dir():
        raise ValueError(f"--output is {folder}; give the name of a folder in an existing one.")
    options = model_options(state)
    size, layer = int(options["ensemble_size"]), options.get("ensemble_share_after")
    folder.mkdir(exist_ok=True)
    paths = [folder / f"member{m}.pt" for m in range(size)]
    for path in paths:
        refuse_output(path, [source], arguments.overwrite)
    write_all((path, _member(state, m)) for m, path in enumerate(paths))
    arch = options["ensemble_arch"]
    print(f"wrote {paths[0]} to {paths[-1].name}: {arch}, a training begins anew with each")
    if layer:
        print(
            f"their outputs are not those in the ensemble, where they shared the features of {layer}"
        )


def _member(state: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the checkpoint of one member; the ensemble's stays as it is."""
    prefix = f"members.{number}."
    tensors = state["model"]
    rest = {
        key: value for key, value in state.items() if key not in ("model", "last_optimizer_state")
    }
    made = begun_anew(copy.deepcopy(rest))
    made["model"] = {
        key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
    }
    _give_options(made)
    return made


def _give_options(state: dict[str, Any]) -> None:
    """Let the options be those of a member that was trained alone, in place."""
    plugin.register()
    from fairseq.models import ARCH_MODEL_REGISTRY

    arch = model_options(state)["ensemble_arch"]
    kind = ARCH_MODEL_REGISTRY.get(arch)
    criterion = name_of(state, "criterion")
    if criterion.removeprefix("moe_") == "cmcl":
        images = "image_classification"  # a task, and its criterion
        stock = images if name_of(state, "task").removeprefix("moe_") == images else "cross_entropy"
        rename(state, "criterion", criterion.replace("cmcl", stock))
    rename(state, "model", arch)
    keys = [option.key for table in (EnsembleConfig, CMCLConfig) for option in options_in(table)]
    if not getattr(kind, "has_experts", False):
        keys += [
            option.key for part in ("task", "criterion") for option in options_of_experts(part)
        ]
        for part in PARTS:
            rename(state, part, name_of(state, part).removeprefix("moe_"))
    drop(state, keys)
    dataclass = getattr(kind, "__dataclass", None)
    if dataclass is not None and (state.get("cfg") or {}).get("model") is not None:
        # What has a dataclass is written as such: stock opens no plain command line without warning.
        own = options_of(state, "model")
        known = {item.name for item in fields(dataclass)}
        state["cfg"]["model"] = {**{key: own[key] for key in own.keys() & known}, "_name": arch}
