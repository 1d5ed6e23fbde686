"""Mixins that let fairseq's tasks train and use models with experts, on one or several ranks."""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from numbers import Number
from typing import Any

import torch
from fairseq.data.iterators import EpochBatchIterator
from torch import nn

from fairseq_tutel.checkpoint import experts
from fairseq_tutel.moe.balance import update_biases
from fairseq_tutel.moe.build import hashed_seed
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.update_tuner import UpdateTuner
from fairseq_tutel.option import read
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.guard import CommunicationError, guarded
from fairseq_tutel.plugin.feed_forward import contexts_of, moe_layers
from fairseq_tutel.plugin.opening.several_ranks import NoSentences, running_command
from fairseq_tutel.plugin.optim.moe_optimizer import innermost_optimizer
from fairseq_tutel.plugin.registration.variants import change_class
from fairseq_tutel.plugin.run_state import config_of, root_of
from fairseq_tutel.plugin.training.epoch_iterator import ElasticEpochBatchIterator
from fairseq_tutel.plugin.training.options import TaskConfig

logger = logging.getLogger(__name__)


class InferenceMixin:
    """Mixin for a fairseq task class that lets a command use models on several ranks."""

    _iterator: Any = None

    def get_batch_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Return fairseq's batch iterator, and store it for a command on several ranks."""
        iterator = super().get_batch_iterator(*args, **kwargs)  # type: ignore[misc]
        if running_command() is not None:
            self._iterator = iterator
        return iterator

    def build_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Build fairseq's sequence generator; raise an error if this rank has no sentences."""
        last = self._iterator
        if last is not None and last.shard_id >= len(last.frozen_batches):
            raise NoSentences
        # fairseq's hub passes prefix_allowed_tokens_fn, but some tasks do not accept this argument.
        if kwargs.get("prefix_allowed_tokens_fn", 0) is None:
            del kwargs["prefix_allowed_tokens_fn"]
        return super().build_generator(*args, **kwargs)  # type: ignore[misc]

    def eval_lm_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of fairseq-eval-lm; raise an error for --context-window on several ranks."""
        command = running_command()
        if command is not None and command.cfg.eval_lm.context_window > 0:
            raise ValueError(
                f"--context-window is {command.cfg.eval_lm.context_window}, which does not work on several "
                "ranks, because each batch needs the previous one; run fairseq-eval-lm on one rank."
            )
        return super().eval_lm_dataloader(*args, **kwargs)  # type: ignore[misc]

    def valid_step(self, sample: Any, model: nn.Module, criterion: Any, **kwargs: Any) -> Any:
        """Validate this rank's batch, if there is one, then run this rank's experts for other ranks."""
        command = running_command()
        if command is None:
            return super().valid_step(sample, model, criterion, **kwargs)  # type: ignore[misc]
        result: Any = (0.0, 0, {})
        if sample:
            result = super().valid_step(sample, model, criterion, **kwargs)  # type: ignore[misc]
        command.rest()
        return result


class MoETaskMixin(InferenceMixin):
    """Mixin for a fairseq task class that trains models with experts, on one or several ranks."""

    _has_experts = False
    datasets: dict[str, Any]  # The keys are splits of the data.
    dataset_to_epoch_iter: dict[Any, Any]  # fairseq caches iterators in this dict.
    moe_tuner: UpdateTuner | None = None
    _micro_batches = 0  # The value of --moe-micro-batches.
    _seed = 1  # The value of --seed.
    _update = (-1, -1)  # The optimizer's `times_clipped` and the number of the current update.
    _ran_in_update = 0  # The number of this rank's micro-batches in the current update, without dummies.

    def take_experts(self, layers: Sequence[MoELayer], tuner: UpdateTuner | None) -> None:
        """Store the tuner of the model's MoE layers, and apply this task's options to the layers."""
        self._has_experts, self.moe_tuner = True, tuner
        options, root = read(TaskConfig, config_of(self)), root_of(self)
        if root is not None:
            self._micro_batches, self._seed = options.moe_micro_batches, int(root.common.seed)
        if options.record_a2a_perf_stats:
            for layer in layers:
                layer.time_exchanges()

    def build_criterion(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the criterion; warn if experts have no balance loss."""
        criterion = super().build_criterion(cfg, *args, **kwargs)  # type: ignore[misc]
        if not (self._has_experts and world.is_first()):
            return criterion
        if not hasattr(criterion, "gate_loss"):
            logger.warning(
                "criterion %s trains the experts without a balance loss; use one named moe_…",
                type(criterion).__name__,
            )
        return criterion

    def train_step(
        self,
        sample: Any,
        model: nn.Module,
        criterion: Any,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward on one micro-batch of a training step.

        With `ignore_grad`, the micro-batch is a dummy batch, whose tokens are neither routed nor logged.
        """
        layers = moe_layers(model)
        if any(layer.experts.weights.of_all for layer in layers):
            experts.drop_everywhere(model)
        for context in contexts_of(layers):
            context.begin_step(is_dummy=ignore_grad, update=update_num)
        if hasattr(criterion, "begin_step"):
            criterion.begin_step(update_num, is_dummy=ignore_grad)
        self._begin_micro_batch(0 if ignore_grad else _tokens_of(sample), optimizer, update_num)
        if self._micro_batches and not ignore_grad:
            self._seed_micro_batch(update_num)
        error = sys.exc_info()[1]
        if isinstance(error, FloatingPointError) and "Nan/Inf" in str(error):
            # After a NaN error, fairseq's trainer repeats the step to find the module with the NaN.
            raise FloatingPointError(
                f"the loss or a gradient became NaN or infinite at update {update_num}; lower --lr, set "
                "--clip-norm, or look for bad input, and continue from the last checkpoint."
            )
        step = f"the training step of update {update_num}"
        with guarded(step), _refused_on_several_ranks(step):
            result = super().train_step(  # type: ignore[misc]
                sample, model, criterion, optimizer, update_num, ignore_grad, **kwargs
            )
        if self.moe_tuner is not None:
            self.moe_tuner.end()  # The tuner's measured time includes the backward pass.
        if ignore_grad:
            # fairseq's trainer ignores a dummy batch's log only at the end of an update, so log zeros.
            loss, sample_size, log = result
            result = loss, _zero(sample_size), {key: _zero(value) for key, value in log.items()}
        return result

    def _begin_micro_batch(self, num_tokens: int, optimizer: Any, update_num: int) -> None:
        """Recognize the start of an update, and notify the tuner of the update or the micro-batch."""
        # Gradients are clipped once per update, even if an overflow then skips the optimizer step.
        update = (getattr(innermost_optimizer(optimizer), "times_clipped", 0), update_num)
        is_new = update != self._update
        if is_new:
            self._update, self._ran_in_update = update, 0
        if self.moe_tuner is not None:
            begin = self.moe_tuner.begin if is_new else self.moe_tuner.add_micro_batch
            begin(num_tokens)

    def _seed_micro_batch(self, update_num: int) -> None:
        """Seed torch by a micro-batch's position in the update, so dropout does not depend on the rank."""
        position = world.rank() + self._ran_in_update * world.size()
        torch.manual_seed(hashed_seed(self._seed, f"update {update_num}", position, "micro-batch"))
        self._ran_in_update += 1

    def optimizer_step(self, optimizer: Any, model: nn.Module, update_num: int) -> None:
        """Run the optimizer step, and then update the balance biases from the expert loads of all ranks."""
        super().optimizer_step(optimizer, model, update_num)  # type: ignore[misc]
        update_biases(model)

    def valid_step(self, sample: Any, model: nn.Module, criterion: Any, **kwargs: Any) -> Any:
        """Run fairseq's validation step; an out-of-memory error on several ranks ends the job."""
        for context in contexts_of(moe_layers(model)):
            context.begin_step()
        step = "a validation step"
        with guarded(step), _refused_on_several_ranks(step):
            return super().valid_step(sample, model, criterion, **kwargs)  # type: ignore[misc]

    def begin_valid_epoch(self, epoch: int, model: nn.Module) -> None:
        """Before a validation, discard the all-to-all times that were measured in training."""
        super().begin_valid_epoch(epoch, model)  # type: ignore[misc]
        for layer in moe_layers(model):
            if layer.timer is not None:
                layer.timer.read_and_reset()

    def load_dataset(self, split: str, *args: Any, **kwargs: Any) -> None:
        """Load a split of the data; a resumed run draws random numbers like an uninterrupted run."""
        epoch = kwargs.get("epoch", 1)
        draws = epoch > 1 and not self.has_sharded_data(split)  # type: ignore[attr-defined]
        if draws:
            kwargs["epoch"] = 1
        super().load_dataset(split, *args, **kwargs)  # type: ignore[misc]
        for later in range(2, epoch + 1) if draws else ():
            self.dataset(split).set_epoch(later)  # type: ignore[attr-defined]

    def get_batch_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Return a batch iterator whose saved position is valid for any number of ranks."""
        epoch, root = kwargs.get("epoch", 1), root_of(self)
        begun = epoch > 1 and self._makes_batches_once(**kwargs)
        if begun:
            kwargs |= {"epoch": 1}
            if root is not None and root.dataset.update_ordered_indices_seed:
                kwargs["seed"] = root.common.seed + 1
        iterator = super().get_batch_iterator(*args, **kwargs)  # type: ignore[misc]
        if type(iterator) is EpochBatchIterator:
            change_class(iterator, ElasticEpochBatchIterator)
        if begun and isinstance(iterator, ElasticEpochBatchIterator):
            iterator.start_in(epoch)
        micro_batches = 0
        if root is not None and self._micro_batches:
            train_set = self.datasets.get(root.dataset.train_subset)  # Only training batches form updates.
            if train_set is not None and iterator.dataset is train_set:
                micro_batches = self._micro_batches
        if isinstance(iterator, ElasticEpochBatchIterator):
            if root is not None:
                iterator.set_update_freq(root.optimization.update_freq, micro_batches)
        elif micro_batches:
            raise ValueError(
                f"--moe-micro-batches is {micro_batches}, but {type(self).__name__} uses its own "
                f"{type(iterator).__name__}, whose batches cannot be divided; remove --moe-micro-batches."
            )
        return iterator

    def _makes_batches_once(
        self,
        dataset: Any = None,
        disable_iterator_cache: bool = False,
        update_epoch_batch_itr: bool = False,
        **others: Any,
    ) -> bool:
        """Return whether fairseq makes batches once for all epochs, and has not made them yet.

        A run that resumes in epoch 3 would make batches with random numbers of epoch 3, not of epoch 1.
        """
        is_cached = dataset in self.dataset_to_epoch_iter
        never = disable_iterator_cache or update_epoch_batch_itr or is_cached
        return not never and self.can_reuse_epoch_itr(dataset)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _refused_on_several_ranks(what: str) -> Iterator[None]:
    """Context manager that ends the job at an out-of-memory error if there are several ranks.

    After such an error, fairseq would skip the batch on this rank only, and other ranks would wait forever.
    """
    try:
        yield
    except RuntimeError as error:
        is_of_memory = "out of memory" in str(error) and not isinstance(error, CommunicationError)
        if world.size() == 1 or not is_of_memory:
            raise
        raise MemoryError(
            f"rank {world.rank()} ran out of memory in {what}; lower --max-tokens or --batch-size, or "
            "add --checkpoint-activations."
        ) from error


def _tokens_of(sample: dict[str, Any]) -> int:
    """Return the number of tokens in a micro-batch, which may be a dict of batches by language pair."""
    if "ntokens" in sample:
        return int(sample["ntokens"])
    return sum(_tokens_of(part) for part in sample.values() if isinstance(part, dict))


def _zero(value: Any) -> Any:
    """Return 0 or zeros in place of a number or tensor, and any other object unchanged."""
    if torch.is_tensor(value):
        return torch.zeros_like(value)
    return type(value)(0) if isinstance(value, Number) else value  # type: ignore[call-arg]


def give_mixin(task: Any) -> None:
    """Add MoETaskMixin to the class of a task that lacks it."""
    if not isinstance(task, MoETaskMixin):
        stock = type(task)
        change_class(task, type(stock.__name__, (MoETaskMixin, stock), {"__module__": __name__}))
