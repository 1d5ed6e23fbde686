"""Builds the experts of an opened model without weights, which the checkpoint provides later.

With --moe-expert-store, the experts stay offloaded in an expert store, which all models of a command share.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from fairseq.models import FairseqDecoder
from fairseq.modules.multihead_attention import MultiheadAttention
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from fairseq_tutel.inference.expert_store import Counters, ExpertStore
from fairseq_tutel.inference.options import StoreConfig
from fairseq_tutel.inference.quantized_linear import quantize_linear_layers
from fairseq_tutel.kernels.quantized import LANES
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.moe.experts import build_experts
from fairseq_tutel.option import read, refuse_bad_values
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.plugin.feed_forward import MoEFeedForward, moe_layers
from fairseq_tutel.plugin.run_state import config_of, is_opened

logger = logging.getLogger(__name__)
# This logger writes JSON lines in fairseq's format: "… | INFO | expert_store | {"calls": …}".
counters_logger = logging.getLogger("expert_store")
# In an opened model, matrices with more elements than SMALL_MATRIX are not initialized.
SMALL_MATRIX = 2**20
DRAWS = (Tensor.normal_, Tensor.uniform_, init.normal_, init.uniform_, init.kaiming_uniform_)
# The open expert stores, which models of an ensemble share.
STORES: "WeakValueDictionary[StoreConfig, ExpertStore]" = WeakValueDictionary()


def store_options(task_cfg: Any, opened: bool, pregated: bool, device: torch.device) -> StoreConfig:
    """Return a task's expert store options; `--moe-expert-tier auto` is replaced by host or disk."""
    options = read(StoreConfig, task_cfg)
    refuse_bad_values(options)
    policy = options.moe_expert_store
    if is_offloaded(options) and not opened:
        raise ValueError(
            f"--moe-expert-store is {policy}, which is only for inference: training needs all experts in "
            "memory; remove it."
        )
    if policy == "pregated" and not pregated:
        raise ValueError(
            "--moe-expert-store is pregated, but this model has no pre-gating; give a model with "
            "--moe-pregate (`fairseq-tutel convert pregate` makes one), or on-demand."
        )
    if options.moe_expert_tier == "auto" and is_offloaded(options):
        tier = "host" if device.type == "cuda" else "disk"
        options = dataclasses.replace(options, moe_expert_tier=tier)
    return options


def is_offloaded(options: StoreConfig) -> bool:
    """Return whether the task options keep experts in an expert store instead of the model."""
    return options.moe_expert_store != "resident"


def meta_experts(config: MoEConfig, topology: Topology, options: StoreConfig) -> ExpertStack:
    """Build experts on torch's meta device, without weights, which a state dict provides later."""
    stack = build_experts(config, topology.part(config.num_experts), device="meta")
    stack.load_later(keep_sources=is_offloaded(options))
    return stack


@contextlib.contextmanager
def for_loading(model_cfg: Any, task: Any) -> Iterator[None]:
    """Context manager for building a model whose weights will be loaded from a checkpoint.

    The model is built in the dtype of --moe-inference-dtype, because fp32 weights would need more memory.
    The large matrices of the built model are not initialized.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(inference_dtype(model_cfg, task) or before)
    try:
        with _SkipLargeDraws() if is_opened(model_cfg) else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


class _SkipLargeDraws(TorchFunctionMode):
    """Torch function mode that skips drawing random numbers for large matrices.

    Drawing random numbers for a large matrix takes longer than loading its weights, and allocates memory.
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
    """Return the dtype of --moe-inference-dtype for an opened model, or None to keep the model's dtype."""
    options = read(StoreConfig, config_of(task)) if is_opened(model_cfg) else StoreConfig()
    refuse_bad_values(options)
    return None if options.moe_inference_dtype == "auto" else torch.bfloat16


def quantize_when_loaded(model: nn.Module, task: Any, device: torch.device) -> None:
    """With `--moe-inference-dtype int8`, quantize the decoder's linear layers when they are loaded.

    Raises:
        ValueError: int8 is given on a GPU, or for a model without a decoder.
    """
    if read(StoreConfig, config_of(task)).moe_inference_dtype != "int8":
        return
    # In fairseq, MultiheadAttention is a subclass of FairseqDecoder, even if an encoder uses it.
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


def fetch_when_loaded(model: nn.Module, options: StoreConfig) -> None:
    """Register a hook that adds the experts of the next loaded state dict to the expert store."""

    def attach(module: nn.Module, keys: Any) -> None:
        if any(".experts." in key for key in keys.missing_keys):  # torch then raises an error.
            return
        store, layers = _store_of(options), moe_layers(module)
        sources = [layer.experts.take_sources() for layer in layers]
        for layer, tensors in zip(layers, sources, strict=True):
            store.add(layer.experts, tensors)

    model.register_load_state_dict_post_hook(attach)


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
        # fairseq-generate has no hook at its end, so the store's counters are logged when the process ends.
        atexit.register(functools.partial(_log_counters, options, store.counters))
    return store


def _log_counters(options: StoreConfig, counters: Counters) -> None:
    facts = {"policy": options.moe_expert_store, "tier": options.moe_expert_tier}
    counters_logger.info(json.dumps({**facts, **dataclasses.asdict(counters)}))
