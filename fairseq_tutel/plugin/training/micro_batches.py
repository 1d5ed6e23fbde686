"""The number of micro-batches of an update over all ranks: --moe-micro-batches, and changes at a resume."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.option import is_whole, read
from fairseq_tutel.plugin.training.epoch_iterator import rounds_of
from fairseq_tutel.plugin.training.options import TaskConfig

logger = logging.getLogger(__name__)


def set_update_freq(root: Any, ranks: int) -> None:
    """Set --update-freq of a FairseqConfig to the rounds that --moe-micro-batches takes on these ranks."""
    count = read(TaskConfig, root.task).moe_micro_batches
    if not count:
        return
    if count < ranks:
        raise ValueError(
            f"--moe-micro-batches is {count}, but this run has {ranks} ranks, and some of them would have "
            f"no micro-batch; give at least {ranks}, or start at most {count} ranks."
        )
    given, rounds = list(root.optimization.update_freq), [rounds_of(count, ranks)]
    if given not in ([1], rounds):
        raise ValueError(
            f"--update-freq is {', '.join(map(str, given))}, but --moe-micro-batches {count} sets it to "
            f"{rounds[0]} on {_number(ranks, 'rank')}; remove --update-freq."
        )
    root.optimization.update_freq = rounds
    empty = rounds[0] * ranks - count
    verb = "is" if empty == 1 else "are"
    note = f", so {_number(empty, 'micro-batch', 'es')} of an update {verb} empty" if empty else ""
    logger.info(
        "--moe-micro-batches %d: set --update-freq %d on %s%s",
        *(count, rounds[0], _number(ranks, "rank"), note),
    )


def log_changed_batch(saved: SavedModel, root: Any) -> None:
    """Log if updates have another number of micro-batches than in the checkpoint that a run resumes.

    It is a warning if the number of ranks caused the change.
    """
    position = (saved.state.get("extra_state") or {}).get("train_iterator") or {}
    epoch = position.get("epoch", 1)
    parts = ("task", "optimization", "distributed_training")
    before = _count({part: saved.options_of(part) for part in parts}, epoch)
    now = _count({part: getattr(root, part) for part in parts}, epoch)
    if before is None or now is None or before[0] == now[0]:
        return
    (count_before, ranks_before), (count, ranks) = before, now
    text = "an update has %s on %s, but had %s on %s in the checkpoint"
    numbers = (
        *(_number(count, "micro-batch", "es"), _number(ranks, "rank")),
        *(_number(count_before, "micro-batch", "es"), _number(ranks_before, "rank")),
    )
    if ranks == ranks_before or read(TaskConfig, root.task).moe_micro_batches:
        logger.info(text, *numbers)
    else:
        logger.warning(f"{text}; %s to keep the batch", *numbers, _fix(count_before, ranks))


def _count(options: Mapping[str, Any], epoch: Any) -> tuple[int, int] | None:
    """Return the number of micro-batches of an update, and of ranks; None if the options are invalid."""

    def value(part: str, key: str, default: Any) -> Any:
        given = options[part]
        return given.get(key, default) if isinstance(given, Mapping) else getattr(given, key, default)

    freqs = value("optimization", "update_freq", [1])
    ranks = value("distributed_training", "distributed_world_size", 1)
    count = value("task", "moe_micro_batches", 0)
    if not isinstance(freqs, Sequence) or not freqs or not is_whole(epoch):
        return None
    freq = freqs[max(0, min(epoch, len(freqs)) - 1)]
    if not all(is_whole(number) and number >= 0 for number in (freq, ranks, count)):
        return None
    return count or freq * ranks, ranks


def _number(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _fix(count: int, ranks: int) -> str:
    """Return the option, or number of ranks, with which updates have so many micro-batches."""
    if count < ranks:
        return f"start at most {_number(count, 'rank')} with --moe-micro-batches {count}"
    if count % ranks:
        return f"give --moe-micro-batches {count}"
    return f"give --update-freq {count // ranks}, or --moe-micro-batches {count} on any number of ranks,"
