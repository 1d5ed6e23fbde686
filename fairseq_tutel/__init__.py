"""This package has Mixture-of-Experts layers for torch, and a plugin for fairseq's `--user-dir`.

The layers need only torch and numpy, which are imported at the first use of a public name. To understand a
layer, read gates, choice, slots, routing, balance, dispatch, experts and layer in moe/, in this order.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairseq_tutel.inference.expert_store import ExpertStore as ExpertStore
    from fairseq_tutel.inference.pregate import pregate as pregate
    from fairseq_tutel.moe.balance import gshard_loss as gshard_loss
    from fairseq_tutel.moe.balance import update_biases as update_biases
    from fairseq_tutel.moe.config import MoEConfig as MoEConfig
    from fairseq_tutel.moe.dispatch import combine as combine
    from fairseq_tutel.moe.dispatch import dispatch as dispatch
    from fairseq_tutel.moe.layer import MoELayer as MoELayer
    from fairseq_tutel.moe.layer import MoEOutput as MoEOutput
    from fairseq_tutel.moe.metrics import routing_metrics as routing_metrics
    from fairseq_tutel.moe.routing import Routing as Routing
    from fairseq_tutel.moe.routing import route as route
    from fairseq_tutel.moe.tutel import moe_layer as moe_layer
    from fairseq_tutel.moe.update_tuner import UpdateTuner as UpdateTuner
    from fairseq_tutel.parallel.groups import Topology as Topology
    from fairseq_tutel.parallel.groups import make_topology as make_topology
    from fairseq_tutel.parallel.strategy import Strategy as Strategy
    from fairseq_tutel.plugin import keep_freed_memory as keep_freed_memory
    from fairseq_tutel.plugin.hub import from_checkpoint as from_checkpoint

__version__ = "0.1.0"

# This table maps each public name of the package to the name of its module.
_MODULES = {
    "ExpertStore": "inference.expert_store",
    "MoEConfig": "moe.config",
    "MoELayer": "moe.layer",
    "MoEOutput": "moe.layer",
    "Routing": "moe.routing",
    "Strategy": "parallel.strategy",
    "Topology": "parallel.groups",
    "UpdateTuner": "moe.update_tuner",
    "combine": "moe.dispatch",
    "dispatch": "moe.dispatch",
    "from_checkpoint": "plugin.hub",
    "gshard_loss": "moe.balance",
    "keep_freed_memory": "plugin",
    "make_topology": "parallel.groups",
    "moe_layer": "moe.tutel",
    "pregate": "inference.pregate",
    "route": "moe.routing",
    "routing_metrics": "moe.metrics",
    "update_biases": "moe.balance",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})
