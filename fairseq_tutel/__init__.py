"""Mixture-of-Experts layers in torch; the same package is a fairseq `--user-dir` plugin.

Importing this needs torch and numpy only. The walk, in reading order: gates, routing, losses,
dispatch, exchange, experts, moe_layer.
"""

from fairseq_tutel.allocator import keep_freed_memory
from fairseq_tutel.comm.balance import update_biases
from fairseq_tutel.comm.how import How
from fairseq_tutel.comm.topology import Topology, make_topology
from fairseq_tutel.config import MoEConfig
from fairseq_tutel.dispatch import combine, dispatch
from fairseq_tutel.losses import gshard_loss
from fairseq_tutel.metrics import routing_metrics
from fairseq_tutel.moe_layer import MoELayer, MoEOutput
from fairseq_tutel.routing import Routing, route

# After the module of this name was imported: the name is the function from here on, and
# `from fairseq_tutel.moe_layer import MoELayer` finds the module all the same.
from fairseq_tutel.tutel_layer import moe_layer
from fairseq_tutel.update_tuner import UpdateTuner

__version__ = "0.1.0"

__all__ = [
    "How",
    "MoEConfig",
    "MoELayer",
    "MoEOutput",
    "Routing",
    "Topology",
    "UpdateTuner",
    "combine",
    "dispatch",
    "gshard_loss",
    "keep_freed_memory",
    "make_topology",
    "moe_layer",
    "route",
    "routing_metrics",
    "update_biases",
]
