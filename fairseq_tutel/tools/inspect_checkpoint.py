"""The tool `inspect` prints the content of a checkpoint: experts, shapes, bytes, options and updates.

The tool reads checkpoints of this package, dense fairseq checkpoints, single files of Meta's moe branch or
of Tutel, and other files of tensors. Pickled code in a checkpoint is not executed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_tutel.files import printable
from fairseq_tutel.plugin.options import options_of
from fairseq_tutel.tools.arguments import aligned

if TYPE_CHECKING:
    from fairseq_tutel.checkpoint.description import Facts

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def add_to(tools: Any) -> None:
    """Add the tool `inspect` as a subcommand of `python -m fairseq_tutel`."""
    parser = tools.add_parser("inspect", description=__doc__, example="SAVE/checkpoint_best.pt")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint file or a --save-dir")
    for name, text in (
        ("--check", "read all bytes, also of expert files, and compare them with the checksums"),
        ("--json", "print everything as JSON"),
    ):
        parser.add_argument(name, action="store_true", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the content of a checkpoint file, as text or JSON."""
    from fairseq_tutel.checkpoint.description import describe
    from fairseq_tutel.checkpoint.files import checkpoint_in, read_file

    path = checkpoint_in(Path(arguments.checkpoint), "CHECKPOINT")
    state = read_file(path, "CHECKPOINT", verify=False)
    facts = describe(state, path, options_of("model"), arguments.check)
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        print(printable("\n".join(_lines(facts))))


def _lines(facts: Facts) -> list[str]:
    from fairseq_tutel.checkpoint.description import OURS

    lines = [f"{facts['file']}: {facts['kind']}, {_size(facts['bytes_of_file'])}"]
    names = [f"{part} {name}" for part, name in facts.get("names", {}).items()]
    lines += [", ".join(names)] if names else []
    if facts.get("updates") is not None:
        lines.append(f"{facts['updates']} updates, {_epoch(facts)}")
    lines.append(", ".join(f"{name} {_size(count)}" for name, count in facts["bytes"].items()))
    if "shards" in facts:
        shards = facts["shards"]
        where = ", ".join(shards["folders"])
        lines.append(f"sharded: experts in {shards['files']} files, {_size(shards['bytes'])}, of {where}")
    if "checked" in facts:
        why_not = "not checked: a file from before torch 1.6 has no checksums"
        lines.append("checked: all bytes match their checksums" if facts["checked"] else why_not)
    if "options" in facts:
        options = [f"{flag} {value}" for flag, value in facts["options"].items()]
        lines.append(f"MoE options other than the defaults: {', '.join(options) or 'none'}")
    if "layers" in facts:
        lines += ["", _table_of_layers(facts["layers"])]
    if facts["kind"] != OURS:
        rows = [["tensor", "number", "shape", "dtype"]]
        rows += [[t["name"], str(t["number"]), _shape(t["shape"]), t["dtype"]] for t in facts["tensors"]]
        lines += ["", aligned(rows)]
    return lines


def _epoch(facts: Facts) -> str:
    """Return a checkpoint's position in the training data as text, such as "2 epochs done"."""
    # At the end of an epoch, fairseq saves the number of the next epoch.
    epoch, batches = facts["epoch"], facts["batches_in_epoch"]
    if epoch is not None and batches == 0:
        return f"{epoch - 1} epochs done"
    return f"in epoch {'unknown' if epoch is None else epoch}"


def _table_of_layers(layers: Sequence[Facts]) -> str:
    rows = [["layer", "experts", "one expert", "dtype", "size", "other parameters"]]
    for layer in layers:
        row = [layer["layer"], str(layer["experts"]), _shapes(layer["shapes"])]
        rows.append([*row, _stored(layer), _size(layer["bytes"]), _shapes(layer["beside"]) or "-"])
    return aligned(rows)


def _stored(layer: Facts) -> str:
    if "stored" not in layer:
        return layer["dtype"]
    relative, worst = (max(layer[key].values()) for key in ("relative_error", "worst_row_error"))
    return f"{layer['dtype']} in {layer['stored']}: error {relative:.1e}, worst row {worst:.1e}"


def _shapes(named: dict[str, Sequence[int]]) -> str:
    return " ".join(f"{name} {_shape(shape)}" for name, shape in named.items())


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "number"


def _size(count: int) -> str:
    """Return a number of bytes as text with a unit, such as 1.5 MiB."""
    unit = min(max(count.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{count / 1024**unit:.{1 if unit else 0}f} {UNITS[unit]}"
