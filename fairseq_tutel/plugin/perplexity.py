"""The perplexity of all ranks: on several, fairseq-eval-lm logs that of the first one's part."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fairseq_tutel.ranks.guard import guarded

logger = logging.getLogger(__name__)


class Scored:
    """The batches that fairseq-eval-lm scores, and for how many tokens it divides by.

    Args:
        batches: with a length, of samples of a language model; empty ones hold nothing.
        dictionary: of the targets.
        cfg: the command's FairseqConfig.
    """

    def __init__(self, batches: Any, dictionary: Any, cfg: Any) -> None:
        self.batches, self.pad = batches, dictionary.pad()
        self.tokens = 0
        self.without_first = bool(getattr(cfg.task, "add_bos_token", False))
        # A word in pieces counts once.
        mark = cfg.common_eval.post_process
        marked = mark in ("subword_nmt", "@@ ")
        self.goes_on = torch.tensor(
            [marked and word.endswith(mark.rstrip()) for word in dictionary.symbols]
        )

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for sample in self.batches:
            if "net_input" in sample:
                self.tokens += self._tokens(sample["target"])
            yield sample

    def _tokens(self, targets: Iterable[torch.Tensor]) -> int:
        total = 0
        for target in targets:
            words = target[target != self.pad].cpu()[int(self.without_first) :]
            total += len(words) - int(self.goes_on[words[:-1]].sum())
        return total


def tell_of_all_ranks(results: dict[str, Any], tokens: int) -> None:
    """Log the loss and the perplexity of all ranks' tokens. Collective.

    Args:
        results: what fairseq-eval-lm's `main` returned on this rank: the mean loss of its tokens, in bits.
        tokens: how many they were.

    Raises:
        ValueError: no rank had any.
    """
    parts: list[Any] = [None] * dist.get_world_size()
    with guarded("the gathering of all ranks' losses"):
        dist.all_gather_object(parts, (float(results["loss"]) * tokens, tokens))
    total = sum(count for _, count in parts)
    if total == 0:
        raise ValueError(
            "no rank scored any token, so there is no perplexity: fairseq-eval-lm skips what is longer "
            "than the model's positions; give the --tokens-per-sample that the model was trained with."
        )
    loss = sum(bits for bits, _ in parts) / total
    logger.info(
        "all %d ranks: %s tokens, Loss (base 2): %.4f, Perplexity: %.2f",
        len(parts),
        f"{total:,}",
        loss,
        2**loss,
    )
