"""What a task must do where experts are trained or used, on one rank and on several.

Stock tasks get it attached when a model with experts is built.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from numbers import Number
from typing import Any
from weakref import WeakSet

import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.data.iterators import EpochBatchIterator
from fairseq.models import FairseqEncoder
from torch import nn

from fairseq_tutel.checkpoint import experts
from fairseq_tutel.moe.balance import update_biases
from fairseq_tutel.moe.config import CriterionConfig, MoEConfig, SidesConfig, TaskConfig
from fairseq_tutel.moe.options import read
from fairseq_tutel.moe.update_tuner import UpdateTuner
from fairseq_tutel.optim.moe_optimizer import innermost_optimizer
from fairseq_tutel.plugin.announce import Facts, say_what_has_no_effect
from fairseq_tutel.plugin.feed_forward import contexts_of, moe_layers
from fairseq_tutel.plugin.opening import several_ranks
from fairseq_tutel.plugin.training import finite
from fairseq_tutel.plugin.training.checks import config_of, root_of
from fairseq_tutel.plugin.training.resume import ElasticEpochBatchIterator
from fairseq_tutel.ranks import groups, world
from fairseq_tutel.ranks.guard import guarded

logger = logging.getLogger(__name__)


class InferenceMixin:
    """What a task must do where models are used on several ranks, which stock does for trainings alone."""

    _iterator: Any = None
    _epoch = 0  # of the training's iterator that was asked for last
    dataset_to_epoch_iter: dict[Any, Any]  # of stock: those that are read again
    target_dictionary: Any  # a language modeling task's

    def get_batch_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Return the stock iterator; those that no epoch of the training will read again let workers go.

        They are parts of cycles, and where they are garbage that ends them each takes 5 seconds.
        """
        iterator = super().get_batch_iterator(*args, **kwargs)  # type: ignore[misc]
        if several_ranks.running():
            self._iterator = iterator
        given = self.__dict__.setdefault("_given", WeakSet())
        epoch = kwargs.get("epoch", 1)
        if epoch > self._epoch:  # of a training: validations ask for the first
            kept = [iterator, *self.dataset_to_epoch_iter.values()]
            for ended in given.difference(kept):
                ended._cur_epoch_itr = ended.dataloader = None
            self._epoch = epoch
        given.add(iterator)
        return iterator

    def build_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Return the stock generator; it is built after the batches of fairseq-generate.

        Raises:
            NoSentences: this rank has none of them.
        """
        last = self._iterator
        if last is not None and last.shard_id >= len(last.frozen_batches):
            raise several_ranks.NoSentences
        # fairseq's hub gives it, and not all tasks take it.
        if kwargs.get("prefix_allowed_tokens_fn", 0) is None:
            del kwargs["prefix_allowed_tokens_fn"]
        return super().build_generator(*args, **kwargs)  # type: ignore[misc]

    def eval_lm_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of fairseq-eval-lm; on several ranks their tokens are counted.

        Raises:
            ValueError: a context window on several ranks.
        """
        command = several_ranks.running()
        if command is not None and command.cfg.eval_lm.context_window > 0:
            raise ValueError(
                f"--context-window is {command.cfg.eval_lm.context_window} on several ranks, where the "
                "context of a batch would be another one than that before it; run fairseq-eval-lm on one."
            )
        batches = super().eval_lm_dataloader(*args, **kwargs)  # type: ignore[misc]
        if command is not None:
            batches = command.count(batches, self.target_dictionary)
        return batches

    def valid_step(self, sample: Any, model: nn.Module, criterion: Any, **kwargs: Any) -> Any:
        """Run the stock step, or none where the rank has no batch left; serve others until they end."""
        command = several_ranks.running()
        if command is not None and not sample:
            result: Any = (0.0, 0, {})
        else:
            result = super().valid_step(sample, model, criterion, **kwargs)  # type: ignore[misc]
        if command is not None:
            command.rest()
        return result


class MoETaskMixin(InferenceMixin):
    """Goes before a FairseqTask class: what it must do to train experts, on one rank and on several."""

    _has_experts = False
    _layer_config: MoEConfig  # of the first MoE layer, where there is one
    moe_tuner: UpdateTuner | None = None
    _clipped_before = -1

    def build_criterion(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the criterion; say so once when it has no balance loss."""
        criterion = super().build_criterion(cfg, *args, **kwargs)  # type: ignore[misc]
        if not self._has_experts and world.is_first():
            logger.warning(
                "the model has no experts: the --moe- options of %s have no effect",
                type(self).__name__,
            )
        if self._has_experts and not hasattr(criterion, "gate_loss") and world.is_first():
            twin = f"moe_{getattr(cfg, '_name', None) or getattr(cfg, 'criterion', '')}"
            logger.warning(
                "criterion %s trains the experts without a balance loss; %s one",
                type(criterion).__name__,
                f"{twin} has" if twin in CRITERION_REGISTRY else "those named moe_… have",
            )
            if read(TaskConfig, config_of(self)).record_a2a_perf_stats:
                logger.warning("--record-a2a-perf-stats has no effect without such a criterion")
        if hasattr(criterion, "gate_loss") and self._has_experts and world.is_first():
            facts = Facts(layer=self._layer_config, sides=SidesConfig())
            say_what_has_no_effect(read(CriterionConfig, cfg), facts)
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
        """Run forward and backward; a dummy batch, which keeps ranks in step, routes and counts nothing."""
        layers = moe_layers(model)
        if any(layer.experts.weights.of_all for layer in layers):
            experts.drop_everywhere(model)
        for context in contexts_of(layers):
            context.begin_step(is_dummy=ignore_grad)
        begin_step = getattr(criterion, "begin_step", None)
        if begin_step is not None:
            begin_step(update_num, is_dummy=ignore_grad)
        self._begin_micro_batch(0 if ignore_grad else _tokens_of(sample), optimizer)
        error = sys.exc_info()[1]
        diagnosing = isinstance(error, FloatingPointError) and "Nan/Inf" in str(error)
        if diagnosing:
            _drop_backward_hooks_of_encoders(model)
        step = f"the training step of update {update_num}"
        with guarded(step), _out_of_memory_ends_the_job(step):
            result = super().train_step(  # type: ignore[misc]
                sample, model, criterion, optimizer, update_num, ignore_grad, **kwargs
            )
        if self.moe_tuner is not None:
            self.moe_tuner.end()  # what follows the last backward takes as long whatever was chosen
        if diagnosing:
            # The trainer runs the step again after a NaN, to find where; then it raises this.
            root = root_of(self)
            way_back = root and finite.way_back_from(root.checkpoint.save_dir, model, update_num)
            raise FloatingPointError(
                f"the loss or a gradient became NaN or infinite at update {update_num} (loss now "
                f"{float(result[0]):g}); lower --lr, set --clip-norm, or look for bad input"
                f"{f'; {way_back}' if way_back else ''}."
            )
        if ignore_grad:
            # The trainer leaves it out by itself where it is the last of its update, and there alone.
            loss, sample_size, log = result
            result = loss, _zero(sample_size), {key: _zero(value) for key, value in log.items()}
        return result

    def _begin_micro_batch(self, num_tokens: int, optimizer: Any) -> None:
        """Let the tuner choose how an update runs, before its first micro-batch; count the others."""
        if self.moe_tuner is None:
            return
        # An update whose gradients were clipped is over, also where an overflow kept it from its step.
        clipped = getattr(innermost_optimizer(optimizer), "times_clipped", 0)
        if clipped != self._clipped_before:
            self._clipped_before = clipped
            self.moe_tuner.begin(num_tokens)
        else:
            self.moe_tuner.add_micro_batch(num_tokens)

    def optimizer_step(self, optimizer: Any, model: nn.Module, update_num: int) -> None:
        """Take the step, then let the balance biases take theirs, by the load of all ranks."""
        super().optimizer_step(optimizer, model, update_num)  # type: ignore[misc]
        # Under --amp a step with an overflow comes here too, and its batch comes again.
        if getattr(innermost_optimizer(optimizer), "took_step", True):
            update_biases(model)

    def valid_step(self, sample: Any, model: nn.Module, criterion: Any, **kwargs: Any) -> Any:
        """Run the stock step; out of memory ends the job."""
        for context in contexts_of(moe_layers(model)):
            context.begin_step()
        step = "a validation step"
        with guarded(step), _out_of_memory_ends_the_job(step):
            return super().valid_step(sample, model, criterion, **kwargs)  # type: ignore[misc]

    def begin_valid_epoch(self, epoch: int, model: nn.Module) -> None:
        """Forget what the last backward left in the timers."""
        super().begin_valid_epoch(epoch, model)  # type: ignore[misc]
        for layer in moe_layers(model):
            if layer.timer is not None:
                layer.timer.read_and_reset()

    def load_dataset(self, split: str, *args: Any, **kwargs: Any) -> None:
        """Load a split; what stock draws when the first epoch is loaded, a resumed one needs too."""
        epoch = kwargs.get("epoch", 1)
        draws = epoch > 1 and not self.has_sharded_data(split)  # type: ignore[attr-defined]
        if draws:
            kwargs["epoch"] = 1
        super().load_dataset(split, *args, **kwargs)  # type: ignore[misc]
        for later in range(2, epoch + 1) if draws else ():
            self.dataset(split).set_epoch(later)  # type: ignore[attr-defined]

    def get_batch_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Return the stock iterator, whose epochs are made the same on every number of ranks."""
        iterator, root = super().get_batch_iterator(*args, **kwargs), root_of(self)  # type: ignore[misc]
        if type(iterator) is EpochBatchIterator:
            iterator.__class__ = ElasticEpochBatchIterator
        if isinstance(iterator, ElasticEpochBatchIterator):
            if root is not None:
                iterator.update_freq = root.optimization.update_freq
        elif world.is_first():
            logger.info(
                "%s resumes in the middle of an epoch on the same number of ranks only, and on several "
                "ranks with --update-freq above 1 miscounts the last update of an epoch",
                type(iterator).__name__,
            )
        return iterator


def _tokens_of(sample: dict[str, Any]) -> int:
    """Return the tokens of a micro-batch, which may be one for each pair of languages."""
    if "ntokens" in sample:
        return int(sample["ntokens"])
    return sum(_tokens_of(part) for part in sample.values() if isinstance(part, dict))


def _zero(value: Any) -> Any:
    """Return nothing of a number or tensor that is to be added up; else the value."""
    if torch.is_tensor(value):
        return torch.zeros_like(value)
    return type(value)(0) if isinstance(value, Number) else value  # type: ignore[call-arg]


@contextlib.contextmanager
def _out_of_memory_ends_the_job(what: str) -> Iterator[None]:
    """On several ranks, turn an out-of-memory error into one that the trainer does not swallow.

    Stock skips the batch on this rank alone; the others would wait in an exchange for ever.
    """
    try:
        yield
    except RuntimeError as error:
        place = groups.in_use()
        if place.world_size == 1 or "out of memory" not in str(error):
            raise
        raise MemoryError(
            f"rank {place.rank} had too little memory in {what}; lower --max-tokens or "
            "--batch-size, or add --checkpoint-activations."
        ) from error


def _drop_backward_hooks_of_encoders(model: nn.Module) -> None:
    """Let stock look for a NaN where an encoder returns a dict of lists, in which torch finds no tensor.

    Its layers keep their hooks.
    """
    for module in model.modules():
        if isinstance(module, FairseqEncoder):
            module._backward_hooks.clear()


def give_mixin(task: Any) -> None:
    """Give a task the mixin, a stock one by changing its class."""
    if not isinstance(task, MoETaskMixin):
        stock = type(task)
        task.__class__ = type(stock.__name__, (MoETaskMixin, stock), {"__module__": __name__})


def attach(task: Any, model: nn.Module) -> None:
    """Give a task the mixin and the layers the task's options."""
    give_mixin(task)
    task._has_experts, layers = True, moe_layers(model)
    task._layer_config = layers[0].config
    if read(TaskConfig, config_of(task)).record_a2a_perf_stats:
        for layer in layers:
            layer.time_exchanges()
