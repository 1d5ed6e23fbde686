"""The experts of a model that is opened: neither drawn nor in memory before its checkpoint is loaded.

With --moe-expert-store they stay where they lie, those of all models of a command in one store.
"""

import dataclasses
import functools
import json
import logging
import weakref
from typing import Any

import torch
from torch import nn

from fairseq_tutel.inference.expert_store import Counters, ExpertStore
from fairseq_tutel.moe.config import MoEConfig, SidesConfig, StoreConfig
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.moe.experts import build_experts
from fairseq_tutel.moe.options import read, refuse_bad_values
from fairseq_tutel.plugin.announce import Facts, say_what_has_no_effect
from fairseq_tutel.plugin.feed_forward import moe_layers
from fairseq_tutel.plugin.startup import call_at_end
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.groups import Topology

# As fairseq's own are found, under a name: "… | INFO | expert_store | {"calls": …}".
counters_logger = logging.getLogger("expert_store")

# While any model uses it, or models of an ensemble would each have a cache of that size.
_stores: "weakref.WeakValueDictionary[StoreConfig, ExpertStore]" = weakref.WeakValueDictionary()


def store_options(
    task_cfg: Any, layer: MoEConfig, opened: bool, pregated: bool, device: torch.device
) -> StoreConfig:
    """Return a task's options of the store, with the tier that `auto` stands for; say which are idle.

    Args:
        task_cfg: the task's configuration.
        layer: of the model's first layer with experts.
        opened: whether the model comes out of a checkpoint, for use.
        pregated: whether its blocks are told ahead which experts they will use.
        device: that the run will use.

    Raises:
        ValueError: a bad value, or a store where there is no use for one.
    """
    options = read(StoreConfig, task_cfg)
    refuse_bad_values(options)
    policy = options.moe_expert_store
    if stays_away(options) and not opened:
        raise ValueError(
            f"--moe-expert-store is {policy}, which is for models that are used: a training changes all "
            "experts, in memory; drop it."
        )
    if world.is_first():
        say_what_has_no_effect(options, Facts(layer=layer, sides=SidesConfig(), store=options))
    refuse_without_pregating(policy, pregated)
    if options.moe_expert_tier == "auto" and stays_away(options):
        tier = "host" if device.type == "cuda" else "disk"
        options = dataclasses.replace(options, moe_expert_tier=tier)
    return options


def refuse_without_pregating(policy: str, pregated: bool) -> None:
    """Refuse the policy pregated for a model without --moe-pregate.

    Raises:
        ValueError: naming the fix.
    """
    if policy == "pregated" and not pregated:
        raise ValueError(
            "--moe-expert-store is pregated, but no block of this model knows its experts ahead; give a "
            "model with --moe-pregate (`python -m fairseq_tutel convert pregate` makes one), or on-demand."
        )


def stays_away(options: StoreConfig) -> bool:
    """Whether there is a store."""
    return options.moe_expert_store != "resident"


def awaited(config: MoEConfig, topology: Topology, options: StoreConfig) -> ExpertStack:
    """Return experts that a state dict is to bring, or say where they are."""
    stack = build_experts(config, topology.part(config.num_experts), device="meta")
    stack.load_later(keep_sources=stays_away(options))
    return stack


def fetch_when_loaded(model: nn.Module, options: StoreConfig) -> None:
    """Let the next state dict that a model loads leave its experts in the process's store."""

    def attach(module: nn.Module, keys: Any) -> None:
        if any(".experts." in key for key in keys.missing_keys):  # which torch will refuse
            return
        store = _store_of(options)
        for layer in moe_layers(module):
            store.add(layer.experts, layer.experts.take_sources())

    model.register_load_state_dict_post_hook(attach)


def open_stores() -> list[ExpertStore]:
    """Return the stores of the models that are open."""
    return list(_stores.values())


def _store_of(options: StoreConfig) -> ExpertStore:
    store = _stores.get(options)
    if store is None or not store.is_open:
        store = _stores[options] = ExpertStore(
            options.moe_expert_store,
            options.moe_expert_tier,
            options.moe_expert_cache,
            options.moe_expert_cache_policy,
        )
        # The end of a process is that of its command; fairseq-generate has no other that could be seen.
        call_at_end(functools.partial(_tell, options, store.counters))
    return store


def _tell(options: StoreConfig, counters: Counters) -> None:
    facts = {"policy": options.moe_expert_store, "tier": options.moe_expert_tier}
    counters_logger.info(json.dumps({**facts, **dataclasses.asdict(counters)}))
