"""The options of a run, which all ranks get."""

import argparse
import json
from dataclasses import asdict, dataclass

from benchmarks.cluster.network import MOST_NODES

SECTIONS = ("links", "a2a", "overlap", "tuner")
BY_NAME = ("training", "plans")  # not measured by default; training needs fairseq
NETWORKS = ("boxes:2x4:10:1", "cluster:2x4:10:1", "benchmarks/cluster/line.json")
AT_LEAST_1 = (
    *("local", "rate_mbit", "sizes_kib", "repeats", "experts", "model_dim", "hidden_dim", "tokens"),
    *("overlaps", "overlap_tokens", "overlap_hidden_dim", "limit_s", "unit_mbit", "shard_kib"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options, by their names on the command line."""

    nodes: int
    local: int
    rate_mbit: float
    delay_us: float
    sizes_kib: tuple[int, ...]
    tokens: tuple[int, ...]
    overlap_tokens: int
    model_dim: int
    hidden_dim: int
    overlap_hidden_dim: int
    experts: int
    expert_ms_per_row: float
    overlaps: tuple[int, ...]
    repeats: int
    limit_s: float
    sections: tuple[str, ...]
    collectives: tuple[str, ...] | None
    unit_mbit: float
    shard_kib: int

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.local

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The all-to-alls that there are; a node of one rank has no first hop of two."""
        return ("linear", "2dh") if self.local > 1 else ("linear",)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Every r: 0 and the divisors of the ranks per expert."""
        slices = max(1, self.world_size // self.experts)
        return (0, *(r for r in range(1, slices + 1) if slices % r == 0))

    @property
    def more_repeats(self) -> int:
        """Repeats of what a run has few of."""
        return 2 * self.repeats - 1

    def to_json(self) -> str:
        """Return all options as a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Return what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every field of `Settings` as an option."""
    add = parser.add_argument
    add("--nodes", type=int, default=2, help="N namespaces")
    add("--local", type=int, default=2, help="L ranks of each")
    add("--rate-mbit", type=float, default=200, help="of a node's link, each way, in Mbit/s")
    add("--delay-us", type=float, default=0, help="delay of every message to another node, in microseconds")
    add(
        "--sizes-kib",
        type=int,
        nargs="+",
        default=[16, 64, 256, 1024, 4096],
        help="bytes of a rank in an all-to-all, its own share included, in KiB",
    )
    add("--tokens", type=int, nargs="+", default=[16, 64, 256], help="of a rank, for r and the tuner")
    add("--overlap-tokens", type=int, default=768, help="of a rank, for pipelining alone")
    add("--model-dim", type=int, default=256, help="D")
    add("--hidden-dim", type=int, default=64, help="H of an expert, for r and the tuner")
    add("--overlap-hidden-dim", type=int, default=1024, help="H of an expert, for pipelining alone")
    add("--experts", type=int, default=2, help="E of the tuner's layer; more ranks than that slice them")
    add(
        "--expert-ms-per-row",
        type=float,
        default=0.05,
        help="milliseconds of a sleeping expert for a row's forward; backward takes twice as long",
    )
    add("--overlaps", type=int, nargs="+", default=[1, 2, 4, 8], help="every d")
    add(
        "--repeats",
        type=int,
        default=3,
        help="of every static choice, after one that does not count; what is measured less often has more",
    )
    add("--limit-s", type=float, default=300, help="everything is ended after so many seconds")
    add(
        "--sections",
        nargs="+",
        choices=(*SECTIONS, *BY_NAME),
        default=list(SECTIONS),
        help="what to measure",
    )
    add(
        "--collectives",
        nargs="*",
        metavar="NETWORK",
        help="measure, instead, collectives by a forest, a ring and gloo itself over each of these "
        f"networks, a name or a FILE.json; without one, {', '.join(NETWORKS)}",
    )
    add("--unit-mbit", type=float, default=16, help="of their links of bandwidth 1, in Mbit/s")
    add(
        "--shard-kib",
        type=int,
        default=512,
        help="of a rank in an all-gather; in an all-reduce of N ranks it has N of them",
    )


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings of parsed options.

    Raises:
        ValueError: a value that no cluster can have, in one sentence.
    """
    names = Settings.__dataclass_fields__
    given = {name: getattr(arguments, name) for name in names}
    settings = Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    _at_least(settings, "nodes", 2)
    for name in ("delay_us", "expert_ms_per_row"):
        _at_least(settings, name, 0)
    for name in AT_LEAST_1:
        _at_least(settings, name, 1)
    if settings.nodes > MOST_NODES:
        raise ValueError(f"--nodes is {settings.nodes}; give at most {MOST_NODES}, which one subnet holds.")
    if settings.world_size % settings.experts and settings.experts % settings.world_size:
        raise ValueError(
            f"--experts is {settings.experts}, which gives {settings.world_size} ranks unequal parts; give "
            "a divisor or a multiple of the ranks."
        )
    slices = max(1, settings.world_size // settings.experts)
    if settings.hidden_dim % slices:
        raise ValueError(
            f"--hidden-dim is {settings.hidden_dim}, which {slices} ranks of an expert cannot share; "
            f"give a multiple of {slices}."
        )
    if 1 not in settings.overlaps:
        raise ValueError(
            f"--overlaps is {' '.join(map(str, settings.overlaps))}; give 1 too, which the others are "
            "compared with."
        )
    return settings


def _at_least(settings: Settings, name: str, least: int) -> None:
    value = getattr(settings, name)
    for number in value if isinstance(value, tuple) else (value,):
        if not number >= least:
            raise ValueError(f"--{name.replace('_', '-')} is {number}; give at least {least}.")
