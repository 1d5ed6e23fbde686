"""Prepares a user's fairseq model that contains layers of this package, such as `ft.moe_layer`.

`install_experts` prepares models in which the plugin replaces FFNs. A user's own model has MoE layers and
process groups before this module prepares the model.
"""

import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.optim.lr_scheduler import build_lr_scheduler
from fairseq.trainer import Trainer
from torch import nn

from fairseq_tutel.checkpoint import dictionaries
from fairseq_tutel.checkpoint.experts import expert_modules
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.gradients import is_expert, unmark_expert
from fairseq_tutel.parallel.groups import Topology, make_topology
from fairseq_tutel.plugin.feed_forward import MoEFeedForward, moe_layers
from fairseq_tutel.plugin.optim.moe_optimizer import MoEOptimizerMixin
from fairseq_tutel.plugin.optim.zero import half_optimizer
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training.ema import ExpertEMA
from fairseq_tutel.plugin.training.epoch_iterator import set_update_freq
from fairseq_tutel.plugin.training.finite import refuse_loaded
from fairseq_tutel.plugin.training.startup import (
    complete,
    refuse_run,
    start_together,
)
from fairseq_tutel.plugin.training.task import give_mixin
from fairseq_tutel.plugin.training.train_only import freeze

logger = logging.getLogger(__name__)


class MoETrainer(Trainer):
    """fairseq's Trainer for models with experts, which prepares the model for several ranks."""

    def __init__(self, cfg: Any, task: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        prepare(cfg, task, model)
        freeze(cfg, model)
        super().__init__(cfg, task, model, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint, with fingerprints of the model's dictionaries."""
        state: dict[str, Any] = super().state_dict()
        state["extra_state"][dictionaries.KEY] = dictionaries.fingerprints_of(self.get_model())
        return state

    def load_checkpoint(
        self, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Load a checkpoint if there is one, and check its content; end a run that reached --max-update."""
        with RUN.having(cfg=self.cfg, loads_optimizer=not reset_optimizer):
            extra_state = super().load_checkpoint(filename, reset_optimizer, *args, **kwargs)
        if extra_state is not None:
            found = dictionaries.fingerprints_of(self.get_model())
            dictionaries.refuse_other_dictionaries(found, extra_state, filename)
            refuse_loaded(self.cfg, self)
        options = self.cfg.optimization
        if 0 < options.max_update <= self.get_num_updates():  # fairseq checks this only after an update.
            logger.info("--max-update %d is already reached, so nothing was trained", options.max_update)
            options.max_epoch = -1
        return extra_state

    def _build_ema(self) -> None:
        """Build the moving average of --store-ema; each rank averages only its own experts."""
        if self.cfg.ema.store_ema and expert_modules(self._model):
            self._ema = ExpertEMA(self._model, self.cfg.ema, self.device)
        else:
            super()._build_ema()

    def _build_optimizer(self) -> None:
        """Build the optimizer; a MoE optimizer of half-precision parameters needs `half_optimizer`."""
        common, name = self.cfg.common, self.cfg.optimizer._name
        other = common.memory_efficient_fp16 or common.memory_efficient_bf16
        is_half = (common.fp16 or common.bf16) and not other
        is_moe = issubclass(OPTIMIZER_REGISTRY[name], MoEOptimizerMixin)
        if not (is_half and is_moe) or self.cfg.optimization.use_bmuf:
            super()._build_optimizer()
            return
        trained = itertools.chain(self.model.parameters(), self.criterion.parameters())
        self._optimizer = half_optimizer(self.cfg, [each for each in trained if each.requires_grad])
        self._lr_scheduler = build_lr_scheduler(self.cfg.lr_scheduler, self.optimizer)
        self._lr_scheduler.step_update(0)


def prepare(root: Any, task: Any, model: Any) -> None:
    """Prepare a user's model with MoE layers for training and saving on any number of ranks. Collective.

    Raises:
        ValueError: a checkpoint file could not hold all experts, or an option does not work with experts.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, MoELayer)}
    if not layers:
        return
    are_placed = bool(moe_layers(model))
    if not are_placed:
        start_together(root, model, task)
    topology = _topology_of(layers)
    _prepare_experts(model, layers.values(), topology)
    if are_placed:  # `install_experts` has prepared the rest.
        return
    if topology.expert_parallel_size > 1 and getattr(root.task, "eval_bleu", False):
        raise ValueError(
            "--eval-bleu is set, but ranks generate different numbers of words, so they would wait for "
            "each other's experts forever; remove it, or give an --arch whose name begins with moe_."
        )
    RUN.update(topology=topology)
    set_update_freq(root, topology.world_size)
    talks = any("gshard_global" in layer.balance_weights for layer in layers.values())
    sliced = any(layer.experts.part.slices > 1 for layer in layers.values())
    refuse_run(root, model, topology, talks, sliced, ahead=0)
    complete(root)
    give_mixin(task)
    task.take_experts(list(layers.values()), None)


def _prepare_experts(model: Any, layers: Iterable[MoELayer], topology: Topology) -> None:
    """Mark experts as dense if every rank holds them; exclude other experts from data parallelism."""
    for layer in layers:
        if isinstance(layer, MoEFeedForward):  # `install_experts` placed the layer.
            continue
        for parameter in layer.experts.parameters() if topology.expert_parallel_size == 1 else ():
            unmark_expert(parameter)  # Every rank has all experts.
    # torch's data parallelism does not broadcast or reduce `_ddp_params_and_buffers_to_ignore`.
    model._ddp_params_and_buffers_to_ignore = [n for n, p in model.named_parameters() if is_expert(p)]


def _topology_of(layers: Mapping[str, MoELayer]) -> Topology:
    """Return the process groups of all layers; raise ValueError if a file cannot hold all experts."""
    (first, layer), *_ = layers.items()
    size = layer.topology.expert_parallel_size
    for name, other in layers.items():
        topology = other.topology
        if topology.expert_parallel_size != size:
            raise ValueError(
                f"{first} has its experts on {size} ranks, but {name} on {topology.expert_parallel_size}, "
                "and a checkpoint can only hold both if they are equal; give the layers the same topology "
                "(ft.make_topology), or numbers of experts with the same common divisors."
            )
        if size > 1 and topology.world_size != world.size():
            raise ValueError(
                f"{name} has its experts in a group of {topology.world_size} of the {world.size()} ranks, "
                "so a checkpoint cannot hold the experts of the other groups; build it without a group."
            )
        buffers = [key for key in other.experts.state_dict() if key in dict(other.experts.named_buffers())]
        if size > 1 and buffers:
            raise ValueError(
                f"the experts of {name} have the buffer {buffers[0]}, of which a checkpoint would hold "
                "only rank 0's; make it a parameter, or give persistent=False."
            )
    counts = [other.config.num_experts for other in layers.values()]
    return layer.topology if size > 1 else make_topology(counts, requested=1)
