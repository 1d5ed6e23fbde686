"""The facts of a checkpoint as lines of text."""

from collections.abc import Sequence

from fairseq_tutel.tools.inspected import OURS, Facts

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def lines_of(facts: Facts, with_tensors: bool) -> list[str]:
    """Return what to print.

    Args:
        facts: as `described` gives them.
        with_tensors: also list the tensors of a file of ours; those of others always are.
    """
    lines = [f"{facts['file']}: {facts['kind']}, {_size(facts['bytes_of_file'])}"]
    names = [f"{part} {name}" for part, name in facts.get("names", {}).items()]
    lines += [", ".join(names)] if names else []
    if facts.get("updates") is not None:
        lines.append(f"{facts['updates']} updates, {_epoch(facts)}")
    lines.append(", ".join(f"{name} {_size(count)}" for name, count in facts["bytes"].items()))
    if "shards" in facts:
        shards = facts["shards"]
        where = ", ".join(shards["folders"])
        lines.append(
            f"sharded: experts in {shards['files']} files, {_size(shards['bytes'])}, of {where}"
        )
    if "checked" in facts:
        lines.append(
            "checked: every byte is what was saved"
            if facts["checked"]
            else "not checked: a file from before torch 1.6 has no check sums"
        )
    if "options" in facts:
        options = [f"{flag} {value}" for flag, value in facts["options"].items()]
        lines.append(f"options other than the defaults: {', '.join(options) or 'none'}")
    if "layers" in facts:
        lines += ["", *_layers(facts["layers"])]
    if with_tensors or facts["kind"] != OURS:
        lines += ["", *_tensors(facts["tensors"])]
    return lines


def _epoch(facts: Facts) -> str:
    """Say where in the data the file is: at an epoch's end fairseq saves the next one's number."""
    epoch, batches = facts["epoch"], facts["batches_in_epoch"]
    if epoch is not None and batches == 0:
        return f"{epoch - 1} epochs done"
    return f"in epoch {'unknown' if epoch is None else epoch}"


def _layers(layers: Sequence[Facts]) -> list[str]:
    has_load = "load" in layers[0]
    header = ["layer", "experts", "one expert", "dtype", "size", "beside the experts"]
    rows = [header + ["load: least, most, below 0.1"] * has_load]
    for layer in layers:
        row = [
            layer["layer"],
            str(layer["experts"]),
            " ".join(f"{name} {_shape(shape)}" for name, shape in layer["shapes"].items()),
            layer["dtype"],
            _size(layer["bytes"]),
            " ".join(f"{name} {_shape(shape)}" for name, shape in layer["beside"].items()) or "-",
        ]
        if has_load:
            load = layer["load"]
            row.append(f"{min(load):.2f}, {max(load):.2f}, {sum(x < 0.1 for x in load)}")
        rows.append(row)
    return _aligned(rows)


def _tensors(tensors: Sequence[Facts]) -> list[str]:
    rows = [["tensor", "number", "shape", "dtype"]]
    rows += [[t["name"], str(t["number"]), _shape(t["shape"]), t["dtype"]] for t in tensors]
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "number"


def _size(count: float) -> str:
    """Return bytes in the unit in which they are from 1 to 1024."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.{1 if unit else 0}f} {UNITS[unit]}"
