"""Builds the experts of an opened model without memory; the checkpoint later provides their weights.

With --moe-expert-store, the experts stay offloaded. All models of a command share one store.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from fairseq.models import FairseqDecoder
from fairseq.modules.multihead_attention import MultiheadAttention
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from fairseq_tutel.inference.expert_statistics import of_layer, pooled, read_statistics
from fairseq_tutel.inference.expert_store import Counters, ExpertStore
from fairseq_tutel.inference.options import StoreConfig
from fairseq_tutel.inference.quantized_linear import quantize_linear_layers
from fairseq_tutel.kernels.quantized import LANES
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.moe.experts import build_experts
from fairseq_tutel.option import read, refuse_bad_values
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.progress import progress
from fairseq_tutel.plugin.feed_forward import MoEFeedForward, moe_layers
from fairseq_tutel.plugin.run_state import config_of, is_opened, language_pair

logger = logging.getLogger(__name__)
# Logs JSON lines like fairseq's, under a short name: "… | INFO | expert_store | {"calls": …}".
counters_logger = logging.getLogger("expert_store")
# Elements. Larger matrices of an opened model are not initialized.
SMALL_MATRIX = 2**20
DRAWS = (Tensor.normal_, Tensor.uniform_, init.normal_, init.uniform_, init.kaiming_uniform_)
# The open stores, which models of an ensemble share.
STORES: "WeakValueDictionary[StoreConfig, ExpertStore]" = WeakValueDictionary()
PREFETCH, PREFETCH_PAIRS = "--moe-expert-prefetch", "--moe-expert-prefetch-pairs"


def store_options(task_cfg: Any, opened: bool, pregated: bool, device: torch.device) -> StoreConfig:
    """Return a task's expert store options, with `auto` resolved; warn of a cache without a store."""
    options = read(StoreConfig, task_cfg)
    refuse_bad_values(options)
    policy = options.moe_expert_store
    if is_offloaded(options) and not opened:
        raise ValueError(
            f"--moe-expert-store is {policy}, which is only for inference: training needs all experts in "
            "memory; remove it."
        )
    if options.moe_expert_cache != "0" and not is_offloaded(options):
        logger.warning("--moe-expert-cache has no effect without --moe-expert-store")
    if policy == "pregated" and not pregated:
        raise ValueError(
            "--moe-expert-store is pregated, but this model has no pre-gating; give a model with "
            "--moe-pregate (`fairseq-tutel convert pregate` makes one), or on-demand."
        )
    if options.moe_expert_tier == "auto" and is_offloaded(options):
        tier = "host" if device.type == "cuda" else "disk"
        options = dataclasses.replace(options, moe_expert_tier=tier)
    if options.moe_expert_prefetch and is_offloaded(options):
        options = dataclasses.replace(
            options, moe_expert_prefetch_pairs=_pairs_to_prefetch(options, task_cfg)
        )
    return options


def is_offloaded(options: StoreConfig) -> bool:
    """Return whether the options keep experts in an expert store instead of the model."""
    return options.moe_expert_store != "resident"


def meta_experts(config: MoEConfig, topology: Topology, options: StoreConfig) -> ExpertStack:
    """Build experts on torch's meta device, without memory; a state dict later provides their weights."""
    stack = build_experts(config, topology.part(config.num_experts), device="meta")
    stack.load_later(keep_sources=is_offloaded(options))
    return stack


@contextlib.contextmanager
def for_loading(model_cfg: Any, task: Any) -> Iterator[None]:
    """Context manager that builds an opened model for the weights of its checkpoint.

    The model has the dtype of --moe-inference-dtype; otherwise, its fp32 weights would be in memory until
    they are converted. Its large matrices are not initialized.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(inference_dtype(model_cfg, task) or before)
    try:
        with _SkipLargeDraws() if is_opened(model_cfg) else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


class _SkipLargeDraws(TorchFunctionMode):
    """Mode in which random numbers are not drawn for large matrices.

    Drawing them takes longer than loading the weights, and makes the system allocate their memory.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, unless it fills a large tensor with random numbers."""
        kwargs = kwargs or {}
        if func in DRAWS and (filled := args[0] if args else kwargs["tensor"]).numel() > SMALL_MATRIX:
            return filled
        return func(*args, **kwargs)


def inference_dtype(model_cfg: Any, task: Any) -> torch.dtype | None:
    """Return the dtype of --moe-inference-dtype for an opened model; None to keep the model's dtype."""
    options = read(StoreConfig, config_of(task)) if is_opened(model_cfg) else StoreConfig()
    refuse_bad_values(options)
    return None if options.moe_inference_dtype == "auto" else torch.bfloat16


def quantize_when_loaded(model: nn.Module, task: Any, device: torch.device) -> None:
    """Register a hook that quantizes the decoder's linear layers once the model is loaded, if asked.

    Raises:
        ValueError: --moe-inference-dtype is int8 on a GPU, or for a model without a decoder.
    """
    if read(StoreConfig, config_of(task)).moe_inference_dtype != "int8":
        return
    # In fairseq, the class of an encoder's attention is also a subclass of FairseqDecoder.
    decoders = [
        module
        for module in model.modules()
        if isinstance(module, FairseqDecoder) and not isinstance(module, MultiheadAttention)
    ]
    if device.type != "cpu" or not decoders:
        reason = "this model has no decoder" if device.type == "cpu" else "the model is not on a CPU"
        raise ValueError(f"--moe-inference-dtype is int8, but {reason}; give bf16.")

    def quantize(module: nn.Module, keys: Any) -> None:
        try:
            if not sum([quantize_linear_layers(each, without=MoEFeedForward) for each in decoders]):
                logger.warning(
                    "--moe-inference-dtype int8 is replaced by bf16: the decoder has no linear layer whose "
                    "input dimension is a multiple of %d",
                    LANES,
                )
        except ValueError as error:
            raise ValueError(f"--moe-inference-dtype is int8, but {error}; give bf16.") from error

    model.register_load_state_dict_post_hook(quantize)


@contextlib.contextmanager
def progress_of_loading(model: nn.Module) -> Iterator[None]:
    """Context manager that shows how many layers of experts `load_state_dict` has loaded."""
    layers = moe_layers(model)
    with progress("loading experts", len(layers), "layer") as advance, contextlib.ExitStack() as hooks:

        def loaded(module: nn.Module, keys: Any) -> None:
            advance(1)

        for layer in layers:
            hooks.callback(layer.experts.register_load_state_dict_post_hook(loaded).remove)
        yield


def fetch_when_loaded(model: nn.Module, options: StoreConfig) -> None:
    """Register a hook that adds the experts of the next loaded state dict to the expert store."""

    def attach(module: nn.Module, keys: Any) -> None:
        if any(".experts." in key for key in keys.missing_keys):  # torch raises an error afterwards
            return
        store, layers = _store_of(options), moe_layers(module)
        sources = [layer.experts.take_sources() for layer in layers]
        with progress("preparing the expert store", len(layers), "layer") as advance:
            for layer, tensors in zip(layers, sources, strict=True):
                store.add(layer.experts, tensors)
                advance(1)
        if options.moe_expert_prefetch:
            store.fill_cache(_most_used(layers, options))

    model.register_load_state_dict_post_hook(attach)


def _pairs_to_prefetch(options: StoreConfig, task_cfg: Any) -> str:
    """Return the language pairs to prefetch for: those given, or the task's if the file has it, or ""."""
    path = Path(options.moe_expert_prefetch)
    statistics = read_statistics(path, PREFETCH)
    if options.moe_expert_prefetch_pairs:
        pooled(statistics, options.moe_expert_prefetch_pairs.split(","), path, PREFETCH_PAIRS)
        return options.moe_expert_prefetch_pairs
    own = language_pair(task_cfg)
    return own if own in statistics else ""


def _most_used(layers: Sequence[MoEFeedForward], options: StoreConfig) -> list[tuple[ExpertStack, int]]:
    """Return this rank's experts of all layers, with the largest share of their layer's assignments first.

    The experts and their order come from the file of --moe-expert-prefetch. An expert is its stack and its
    index in the stack. Unused experts are left out.
    """
    path, pairs = Path(options.moe_expert_prefetch), options.moe_expert_prefetch_pairs
    statistics = pooled(
        read_statistics(path, PREFETCH), pairs.split(",") if pairs else (), path, PREFETCH_PAIRS
    )
    found = []
    for layer in layers:
        stack, count = layer.experts, layer.config.num_experts
        loads = of_layer(statistics, layer.label, count, path, PREFETCH).load
        found += [(loads[stack.first + e] / count, stack, e) for e in range(stack.num_local)]
    return [(stack, e) for share, stack, e in sorted(found, key=lambda each: -each[0]) if share > 0]


def _store_of(options: StoreConfig) -> ExpertStore:
    """Return the expert store for the given options; models of an ensemble share one store and cache."""
    store = STORES.get(options)
    if store is None or not store.is_open:
        store = STORES[options] = ExpertStore(
            options.moe_expert_store,
            options.moe_expert_tier,
            options.moe_expert_cache,
            options.moe_expert_cache_policy,
            options.moe_expert_compute,
        )
        # fairseq-generate has no hook at its end, so the counters are logged when the process ends.
        atexit.register(functools.partial(_log_counters, options, store.counters))
    return store


def _log_counters(options: StoreConfig, counters: Counters) -> None:
    facts = {"policy": options.moe_expert_store, "tier": options.moe_expert_tier}
    counters_logger.info(json.dumps({**facts, **dataclasses.asdict(counters)}))
