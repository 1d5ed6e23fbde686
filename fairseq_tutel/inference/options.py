"""The options of an expert store, which keeps experts out of memory during inference."""

from dataclasses import dataclass

from fairseq_tutel.files import shown
from fairseq_tutel.option import UNITS, bytes_of, memory

STORE_POLICIES = ("on-demand", "pregated", "prefetch-all")
STORE_TIERS = ("host", "disk")
EVICTIONS = ("lfu", "lru")
STORE_PRODUCTS = ("quantized", "unpacked")
AUTO = "auto"
CACHE_SIZES = (
    "give a number of experts, such as 64, a size with a unit, such as 512MiB "
    f"({', '.join(UNITS)}), or {AUTO}"
)


@dataclass(frozen=True)
class StoreConfig:
    """Options that set where experts are stored during inference and when they are loaded."""

    # fmt: off
    moe_expert_store: str = memory(
        "resident", choices=("resident", *STORE_POLICIES),
        help="when inference loads experts into memory; resident: all experts when the model is opened; "
        "on-demand: a layer's chosen experts when the layer runs; pregated: a layer's chosen experts while "
        "an earlier layer runs (needs --moe-pregate); prefetch-all: all experts of a layer while the "
        "previous layer runs",
    )
    moe_expert_tier: str = memory(
        "auto", choices=("auto", *STORE_TIERS),
        help="source from which --moe-expert-store loads experts; host: host memory; disk: the files of a "
        "sharded checkpoint; auto: host memory on a GPU, otherwise the files",
    )
    moe_expert_cache: str = memory(
        "0", rule=(lambda v: v == AUTO or _limits_of(v) is not None, CACHE_SIZES),
        help="size of the cache that keeps used experts of all layers in memory: a number of experts, a "
        "size such as 2GiB, or auto, which is half of the memory that is free at the first load",
    )
    moe_expert_cache_policy: str = memory(
        "lfu", choices=EVICTIONS,
        help="expert that a full cache evicts: least frequently used (lfu) or least recently used (lru)",
    )
    moe_expert_compute: str = memory(
        "quantized", choices=STORE_PRODUCTS,
        help="how a CPU multiplies by the int8 and int4 experts of --moe-expert-store; quantized: with the "
        "stored integers, and with inputs and outputs rounded to bf16; unpacked (slower): the experts are "
        "first converted to the model's dtype",
    )
    moe_inference_dtype: str = memory(
        "auto", choices=("auto", "bf16", "int8"),
        help="dtype of a model in inference; auto: the dtype that the command sets; bf16: half of "
        "the memory of fp32; int8: int8 for the decoder's linear layers without experts and bf16 for the "
        "rest, which is faster for few sentences on a CPU",
    )
    # fmt: on


def cache_limits(cache: int | str) -> tuple[int | None, int | None]:
    """Parse the size of an expert cache to (bytes, experts), one of which is None, or raise ValueError."""
    limits = _limits_of(str(cache))
    if limits is None:
        raise ValueError(f"cache (--moe-expert-cache) is {shown(cache)}; {CACHE_SIZES}.")
    return limits


def _limits_of(text: str) -> tuple[int | None, int | None] | None:
    if text.strip().isdecimal() and len(text) <= 18:  # int() rejects very long numbers.
        return None, int(text)
    size = bytes_of(text)
    return None if size is None else (size, None)
