"""The load of every expert: a heat map for each MoE layer, run and data set."""

from fairseq_tutel.tools.figures import heat_map, load_scale
from fairseq_tutel.tools.report_section import Picture, Section
from fairseq_tutel.tools.run_log import LOAD, Run

# Of all pictures together, so that many layers do not make a page of many megabytes.
COLUMNS = 4000

TEXT = """
One picture for each MoE layer: a row is an expert, a column the updates from one record to the next.
White is an even share of the tokens; orange experts get more, violet ones less. A row that stays dark
violet is an expert that hardly learns.
"""


def load_section(runs: dict[str, Run]) -> Section:
    """Return the heat maps of the runs that logged loads; without pictures if none did."""
    shown = [
        (name, what, key, kept)
        for name, run in runs.items()
        for what, records in {"training": run.training, **run.subsets}.items()
        for key in run.experts
        if (kept := [record for record in records if key in record.lists])
    ]
    section = Section("load", "Load of every expert", TEXT)
    if shown:
        alt = "From violet, a quarter of an even share or less, over white to orange, four or more."
        section.groups[""] = [Picture("Colours", "", alt, load_scale())]
    for name, what, key, records in shown:
        load = [record.lists[key] for record in records]
        svg = heat_map([r.update for r in records], load, min(200, max(40, COLUMNS // len(shown))))
        layer = key.removeprefix(LOAD).replace("_", " layer ")
        alt = (
            f"{name}, {what}, {layer}: at update {records[-1].update} the {len(load[-1])} experts have "
            f"{min(load[-1]):.2f} to {max(load[-1]):.2f} even shares."
        )
        picture = Picture(layer, "", alt, svg)
        section.groups.setdefault(f"{name}, {what}", []).append(picture)
    return section
