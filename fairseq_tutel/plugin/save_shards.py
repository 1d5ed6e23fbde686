"""A save of the Trainer in which every rank writes its experts, with their optimizer state, into shards."""

from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.trainer import Trainer

from fairseq_tutel.checkpoint import experts as checkpoint
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.optim.moe_optimizer import MoEOptimizerMixin
from fairseq_tutel.ranks.first import of_first


def will_save(trainer: Trainer, epoch_itr: Any, val_loss: float | None) -> bool:
    """Return whether stock, which asks all ranks for their parts first, will write a file. Collective.

    Args:
        trainer: that saves.
        epoch_itr: as `checkpoint_utils.save_checkpoint` takes it.
        val_loss: likewise.
    """
    cfg, updates = trainer.cfg.checkpoint, trainer.get_num_updates()
    if not cfg.no_last_checkpoints:
        return True
    if epoch_itr.end_of_epoch():
        regular = not cfg.no_epoch_checkpoints and epoch_itr.epoch % cfg.save_interval == 0
    else:
        regular = cfg.save_interval_updates > 0 and updates % cfg.save_interval_updates == 0
    # Stock has compared this loss with the best one already.
    best = val_loss is not None and val_loss == checkpoint_utils.save_checkpoint.best
    among_best = val_loss is not None and cfg.keep_best_checkpoints > 0
    return of_first(lambda: regular or best or among_best, "the agreement on what is saved")


def save_in_shards(trainer: Trainer, inner: MoEOptimizerMixin | None, place: Any) -> None:
    """Let every rank write its experts, with their state; the checkpoint saved next says where. Collective.

    Args:
        trainer: that saves.
        inner: the optimizer whose state is saved; None for none.
        place: of this rank.
    """
    model, save_dir = trainer.get_model(), Path(trainer.cfg.checkpoint.save_dir)
    # The optimizer knows parameters by their place in this list, and where they are half, masters of them.
    trained = getattr(trainer.optimizer, "fp16_params", None) or (
        inner.model_params() if inner else []
    )
    index_of = {id(parameter): index for index, parameter in enumerate(trained)}

    def states(parameter: Any) -> Any:
        index = index_of.get(id(parameter))
        return {} if inner is None or index is None else inner.expert_state(index)

    records = checkpoint.save_in_shards(model, place, states, save_dir)
    if inner is None:
        return
    by_index: dict[int, dict[str, Any]] = {}
    for layer, experts in model.named_modules():
        if isinstance(experts, ExpertStack):
            for name, parameter in experts.expert_parameters().items():
                if id(parameter) in index_of:
                    by_index[index_of[id(parameter)]] = {
                        tensor.removeprefix(f"{name}."): record
                        for (of_layer, tensor), record in records.items()
                        if of_layer == layer and tensor.startswith(f"{name}.")
                    }
    inner.save_state(by_index, place)
