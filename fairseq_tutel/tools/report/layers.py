"""The metrics of every MoE layer: a line for each, or a heat map where there are many."""

from fairseq_tutel.tools.report.figures import COLORS, Curve, heat_map, line_chart, scale_of
from fairseq_tutel.tools.report.section import Picture, Section
from fairseq_tutel.tools.training_log import LAYERS, LOAD, Record, Run, layer_of, list_keys

TEXT = """
Of the training: one line for each MoE layer or, where there are more layers than colours, a map with the
first layer on top. The layer that departs from its neighbours is the one to look at below.
"""

# What is logged layer by layer: a picture's title, the label of its axis, whether that begins at 0.
QUANTITIES = {
    "entropy": ("Gate entropy", "entropy (nats)", False),
    "max_violation": ("Busiest expert", "load (even shares)", False),
    "dropped": ("Dropped share", "dropped (%)", True),
    "dead_experts": ("Dead experts", "experts", True),
}


def layer_section(runs: dict[str, Run]) -> Section:
    """Return the pictures of every run that logged lists over layers; without pictures if none did."""
    section = Section("layers", "Layer by layer", TEXT)
    for name, run in runs.items():
        made = [_picture(name, run, key) for key in list_keys(LAYERS, run.training)]
        section.groups[name] = [picture for picture in made if picture is not None]
    return section


def _picture(name: str, run: Run, key: str) -> Picture | None:
    """Return the picture of one quantity; None of drops and dead experts where there never were any."""
    records = [record for record in run.training if key in record.lists]
    quantity = key.removeprefix(LAYERS)
    choice = quantity.removeprefix("weight")
    weight = (f"Weight of choice {choice}", "mean weight", False)
    title, unit, from_zero = QUANTITIES.get(quantity, weight)
    if from_zero and not any(value > 0 for record in records for value in record.lists[key]):
        return None
    labels = [layer_of(load, LOAD) for load in list_keys(LOAD, run.training)]
    last = ", ".join(
        f"{label} {value:g}" for label, value in zip(labels, records[-1].lists[key], strict=True)
    )
    alt = f"{name}, {title.lower()} by layer: at update {records[-1].update} {last}."
    return Picture(title, "", alt, _drawn(records, key, labels, unit, from_zero))


def _drawn(records: list[Record], key: str, labels: list[str], unit: str, from_zero: bool) -> str:
    updates = [record.update for record in records]
    values_UL = [record.lists[key] for record in records]
    if len(labels) > len(COLORS):
        return heat_map(
            updates, values_UL, scale_of(unit, values_UL), rows="MoE layer", legend=True
        )
    curves = [
        Curve(label, updates, values, run=i)
        for i, (label, values) in enumerate(zip(labels, zip(*values_UL, strict=True), strict=True))
    ]
    return line_chart(curves, "updates", unit, from_zero=from_zero)
