"""The options of the expert store."""

from dataclasses import dataclass

from fairseq_tutel.options.byte_sizes import UNITS, bytes_of
from fairseq_tutel.options.option import memory, needs

STORE_POLICIES = ("on-demand", "pregated", "prefetch-all")
STORE_TIERS = ("host", "disk")
EVICTIONS = ("lfu", "lru", "fifo")
CACHE_SIZES = (
    f"give a number of experts, such as 64, or of bytes with a unit, such as 512MiB ({', '.join(UNITS)})"
)
NO_STORE = needs(lambda f: f.store.moe_expert_store != "resident", "--moe-expert-store")


@dataclass(frozen=True)
class StoreConfig:
    """Where experts are stored during inference, and when they are loaded; every task has these options."""

    moe_expert_store: str = memory(
        "resident",
        "when experts are loaded into memory in inference (training ignores it): resident, all when the "
        "model is opened; on-demand, experts with tokens when their layer runs; pregated, these while "
        "the layer before runs, for models with --moe-pregate; prefetch-all, all experts of the next "
        "layer; the result is the same",
        choices=("resident", *STORE_POLICIES),
    )
    moe_expert_tier: str = memory(
        "auto",
        "where --moe-expert-store loads experts from: host, host memory; disk, the files of a sharded "
        "checkpoint; auto, host on a GPU, otherwise disk",
        choices=("auto", *STORE_TIERS),
        no_effect=(NO_STORE,),
    )
    moe_expert_cache: str = memory(
        "0",
        "experts that stay in memory after their use, over all layers: a number of experts, or bytes "
        "with a unit, such as 2GiB",
        rule=(lambda v: _limits_of(v) is not None, CACHE_SIZES),
        no_effect=(NO_STORE,),
    )
    moe_expert_cache_policy: str = memory(
        "lfu",
        "which expert a full cache evicts: lfu, the least frequently used; lru, the least recently used; "
        "fifo, the first fetched",
        choices=EVICTIONS,
        no_effect=(
            NO_STORE,
            needs(lambda f: f.store.moe_expert_cache != "0", "--moe-expert-cache"),
        ),
    )


def cache_limits(cache: int | str) -> tuple[int | None, int | None]:
    """Return (largest number of bytes, largest number of experts) of a cache; one of them is None.

    Args:
        cache: a number of experts, or of bytes with a unit.

    Raises:
        ValueError: it is neither.
    """
    limits = _limits_of(str(cache))
    if limits is None:
        raise ValueError(f"cache (--moe-expert-cache) is {cache!r}; {CACHE_SIZES}.")
    return limits


def _limits_of(text: str) -> tuple[int | None, int | None] | None:
    if text.strip().isdecimal():
        return None, int(text)
    size = bytes_of(text)
    return None if size is None else (size, None)
