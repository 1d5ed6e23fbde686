"""Hides harmless warnings of torch, fairseq and hydra, and corrects two of fairseq's log lines.

A user of fairseq can change nothing about these warnings. A warning with another text still appears, and so
do all warnings with `python -W default` or PYTHONWARNINGS=default.
"""

import logging
import re
import warnings
from typing import NamedTuple

from torch import nn

from fairseq_tutel.plugin.announce import parameter_counts

COUNTS = re.compile(r"num\. (shared|expert) model params: [\d,]+ \(num\. trained: [\d,]+\)")


class Hidden(NamedTuple):
    """A warning to hide: the start of its text, its module, its category, and why it is harmless."""

    text: str  # a regular expression
    module: str  # "" if hydra attributes the warning to one of many callers
    category: type[Warning]
    reason: str


_HOOK = "fairseq looks for the origin of a NaN with such hooks; it then ends the run with an error"
_VERSION = r"\nThe version_base parameter is not specified\.\n"
_OLD_CALL = "fairseq calls hydra in an old way, which works in all versions of hydra that fairseq accepts"
HIDDEN = (
    Hidden(
        "'pin_memory' argument is set as true but no accelerator is found",
        "torch.utils.data.dataloader",
        UserWarning,
        "fairseq always pins memory; without a GPU, torch ignores this",
    ),
    Hidden(
        "Support for mismatched key_padding_mask and attn_mask is deprecated",
        "torch.nn.functional",
        UserWarning,
        "fairseq's attention combines a bool and a float mask; torch converts the bool mask correctly",
    ),
    Hidden(
        r"`torch\.cuda\.amp\.autocast\(args\.\.\.\)` is deprecated",
        "fairseq.tasks.fairseq_task",
        FutureWarning,
        "the old name of the same class",
    ),
    Hidden(
        r"`torch\.cuda\.amp\.GradScaler\(args\.\.\.\)` is deprecated",
        "fairseq.optim.amp_optimizer",
        FutureWarning,
        "the old name of the same class",
    ),
    Hidden(
        r"`torch\.nn\.utils\.weight_norm` is deprecated",
        "torch.nn.utils.weight_norm",
        FutureWarning,
        "the new function would change the names of weights in checkpoints",
    ),
    Hidden("Using non-full backward hooks on a Module", "torch.nn.modules.module", FutureWarning, _HOOK),
    Hidden("Using a non-full backward hook when", "torch.nn.modules.module", FutureWarning, _HOOK),
    Hidden(_VERSION, "hydra.experimental.initialize", UserWarning, _OLD_CALL),
    Hidden(_VERSION, "fairseq_cli.hydra_train", UserWarning, _OLD_CALL),
    Hidden(
        r"hydra\.experimental\.initialize\(\) is no longer experimental",
        "hydra.experimental.initialize",
        UserWarning,
        _OLD_CALL,
    ),
    Hidden(
        r"hydra\.experimental\.compose\(\) is no longer experimental",
        "hydra.experimental.compose",
        UserWarning,
        _OLD_CALL,
    ),
    Hidden(r"\nThe strict flag in the compose API is deprecated", "hydra.compose", UserWarning, _OLD_CALL),
    Hidden(
        "In '[^']*': Usage of deprecated keyword in package header '# @package _group_'",
        "hydra.core.default_element",
        UserWarning,
        "files in fairseq's wheel have this header, and hydra still reads it",
    ),
    Hidden(
        r"\n'[^']*' is validated against ConfigStore schema with the same name\.",
        "",
        UserWarning,
        "fairseq stores its schema under the name of the configuration on purpose",
    ),
    Hidden(
        "Future Hydra versions will no longer change working directory at job runtime by default",
        "hydra._internal.hydra",
        UserWarning,
        "the working directory is that of the installed version; configs/hydra set it",
    ),
)


def hide_warnings() -> None:
    """Hide the warnings of the table, unless the user's own filters show them."""
    for hidden in HIDDEN:
        # Appended filters come after those of -W and PYTHONWARNINGS.
        module = re.escape(hidden.module) + "$" if hidden.module else ""
        warnings.filterwarnings("ignore", hidden.text, hidden.category, module, append=True)


class WholeCounts(logging.Filter):
    """Corrects the numbers of parameters that fairseq-train logs, if the model has experts.

    fairseq counts as experts only the parameters that its data parallelism must not reduce, so it logs 0 on
    one rank, and otherwise the experts of one rank. The corrected lines count all experts of all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, tuple[int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Note the counts of a model when it is logged, and put them into the lines that follow."""
        if isinstance(record.msg, nn.Module):
            self._counts = parameter_counts(record.msg)
        elif self._counts and isinstance(record.msg, str) and (line := COUNTS.fullmatch(record.msg)):
            total, trained = self._counts[line[1]]
            record.msg = f"num. {line[1]} model params: {total:,} (num. trained: {trained:,})"
        return True


def correct_counts() -> None:
    """Correct fairseq-train's lines "num. shared model params" and "num. expert model params"."""
    logging.getLogger("fairseq_cli.train").addFilter(WholeCounts())
