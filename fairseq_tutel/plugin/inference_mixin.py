"""What a task must do where models are used on several ranks, which stock does for trainings alone."""

from typing import Any

from torch import nn

from fairseq_tutel.plugin import parallel_inference


class InferenceMixin:
    """Goes before a FairseqTask class."""

    _iterator: Any = None

    def get_batch_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Return the stock iterator, which says whether this rank has any sentence."""
        iterator = super().get_batch_iterator(*args, **kwargs)  # type: ignore[misc]
        if parallel_inference.running():
            self._iterator = iterator
        return iterator

    def build_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Return the stock generator; it is built after the batches of fairseq-generate.

        Raises:
            NoSentences: this rank has none of them.
        """
        last = self._iterator
        if last is not None and last.shard_id >= len(last.frozen_batches):
            raise parallel_inference.NoSentences
        return super().build_generator(*args, **kwargs)  # type: ignore[misc]

    def eval_lm_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of fairseq-eval-lm; on several ranks their tokens are counted.

        Raises:
            ValueError: a context window on several ranks.
        """
        command = parallel_inference.running()
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
        command = parallel_inference.running()
        if command is not None and not sample:
            result: Any = (0.0, 0, {})
        else:
            result = super().valid_step(sample, model, criterion, **kwargs)  # type: ignore[misc]
        if command is not None:
            command.rest()
        return result
