"""The load and the dropped share of every expert: a heat map for each MoE layer, run and data set."""

from dataclasses import dataclass

from fairseq_tutel.tools.report.figures import DROPPED_SCALE, LOAD_SCALE, Scale, heat_map, legend_of
from fairseq_tutel.tools.report.section import Picture, Section
from fairseq_tutel.tools.training_log import DROPPED, LOAD, Run, layer_of, list_keys

# Of all pictures of a section together, so that many layers do not make a page of many megabytes.
COLUMNS = 4000


@dataclass(frozen=True)
class Maps:
    """One kind of heat maps.

    `prefix` begins the keys of the lists, `colours` says the scale and `values` the last values in
    words. `any_above` is what some value must exceed for a layer to be worth a picture.
    """

    name: str
    title: str
    text: str
    prefix: str
    scale: Scale
    colours: str
    values: str
    any_above: float


KINDS = (
    Maps(
        "load", "Load of every expert",
        "One picture for each MoE layer: a row is an expert, a column the updates from one record to "
        "the next. White is an even share of the tokens; orange experts get more, violet ones less. A "
        "row that stays dark violet is an expert that hardly learns.",
        LOAD, LOAD_SCALE,
        "From violet, a quarter of an even share or less, over white to orange, four or more.",
        "have {:.2f} to {:.2f} even shares", any_above=-1,
    ),
    Maps(
        "dropped", "Dropped share of every expert",
        "Of the tokens that chose an expert, those that found it full, where any did. Rows and columns "
        "are as above. White drops nothing; a row that stays dark is an expert that the gate asks "
        "more of than the capacity factor lets it do.",
        DROPPED, DROPPED_SCALE,
        "From white, nothing dropped, over orange, a quarter, to black, all of it.",
        "drop a share of {:.3f} to {:.3f}", any_above=0,
    ),
)  # fmt: skip


def expert_sections(runs: dict[str, Run]) -> list[Section]:
    """Return the sections of heat maps; without pictures if no run logged such lists."""
    return [_section(maps, runs) for maps in KINDS]


def _section(maps: Maps, runs: dict[str, Run]) -> Section:
    shown = [
        (name, what, key, kept)
        for name, run in runs.items()
        for what, records in {"training": run.training, **run.subsets}.items()
        for key in list_keys(maps.prefix, records)
        if (kept := [record for record in records if key in record.lists])
        and any(value > maps.any_above for record in kept for value in record.lists[key])
    ]
    section = Section(maps.name, maps.title, maps.text)
    if shown:
        section.groups[""] = [Picture("Colours", "", maps.colours, legend_of(maps.scale))]
    columns = min(200, max(40, COLUMNS // max(len(shown), 1)))
    for name, what, key, records in shown:
        values = [record.lists[key] for record in records]
        updates = [record.update for record in records]
        last = maps.values.format(min(values[-1]), max(values[-1]))
        layer = layer_of(key, maps.prefix)
        alt = f"{name}, {what}, {layer}: at update {updates[-1]} the {len(values[-1])} experts {last}."
        svg = heat_map(updates, values, maps.scale, columns=columns)
        section.groups.setdefault(f"{name}, {what}", []).append(Picture(layer, "", alt, svg))
    return section
