"""Mixture-of-Experts layers for torch, and a plugin for fairseq's `--user-dir`.

The import of this package needs only torch and numpy. To understand a layer, read these files of moe/ in
this order: gates, choice, capacity, routing, balance, dispatch, experts, layer.
"""

from fairseq_tutel.hub import from_checkpoint
from fairseq_tutel.inference.expert_store import ExpertStore
from fairseq_tutel.inference.pregate import pregate
from fairseq_tutel.moe.balance import gshard_loss, update_biases
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.dispatch import combine, dispatch
from fairseq_tutel.moe.layer import MoELayer, MoEOutput
from fairseq_tutel.moe.metrics import routing_metrics
from fairseq_tutel.moe.routing import Routing, route
from fairseq_tutel.moe.update_tuner import UpdateTuner
from fairseq_tutel.planning.strategy import Strategy
from fairseq_tutel.plugin import keep_freed_memory
from fairseq_tutel.ranks.groups import Topology, make_topology
from fairseq_tutel.tutel.layer import moe_layer

__version__ = "0.1.0"

How = Strategy  # the former name of Strategy

__all__ = [
    "ExpertStore", "How", "MoEConfig", "MoELayer", "MoEOutput", "Routing", "Strategy", "Topology",
    "UpdateTuner", "combine", "dispatch", "from_checkpoint", "gshard_loss", "keep_freed_memory",
    "make_topology", "moe_layer", "pregate", "route", "routing_metrics", "update_biases",
]  # fmt: skip
