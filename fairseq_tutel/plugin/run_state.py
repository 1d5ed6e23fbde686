"""Holds the configuration and the process groups of the current run, and reads configurations.

fairseq's main functions pass no common object to models, tasks and optimizers, so `RUN` is global.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import OmegaConf

from fairseq_tutel.parallel.groups import Topology


@dataclass
class Run:
    """State of the command that is running."""

    cfg: Any = None  # The configuration is a FairseqConfig.
    # The process groups of the model that was built last; building a teacher does not change them.
    topology: Topology = field(default_factory=Topology)
    loads_optimizer: bool = False  # Whether the checkpoint's optimizer state is also loaded.

    def update(self, **values: Any) -> None:
        """Set the given fields of the run."""
        vars(self).update(values)

    @contextmanager
    def having(self, **values: Any) -> Iterator[None]:
        """Context manager that sets fields of the run, and restores the fields at the end."""
        before = {name: getattr(self, name) for name in values}
        self.update(**values)
        try:
            yield
        finally:
            self.update(**before)


RUN = Run()

# Flag that marks a configuration as read from a checkpoint.
OPENED = "opened_for_use"


def config_of(task: Any) -> Any:
    """Return a task's configuration: `cfg`, or `args` in fairseq's older tasks."""
    cfg = getattr(task, "cfg", None)
    return getattr(task, "args", None) if cfg is None else cfg


def language_pair(task_cfg: Any) -> str:
    """Return the language pair of a task's configuration, such as de-en, or "" if a language is missing."""
    languages = [getattr(task_cfg, key, None) for key in ("source_lang", "target_lang")]
    return "-".join(map(str, languages)) if all(languages) else ""


def root_of(task: Any) -> Any:
    """Return the FairseqConfig of a task's run, or None if the task was built outside of a run."""
    cfg = config_of(task)  # An old task's configuration has no root.
    root = cfg._get_root() if hasattr(cfg, "_get_root") else None
    return RUN.cfg if root is None or "distributed_training" not in root else root


def is_training(task: Any, model_cfg: Any) -> bool:
    """Return whether the model that is being built will be trained, rather than used for inference."""
    return not is_opened(model_cfg) and root_of(task) is not None


def is_opened(model_cfg: Any) -> bool:
    """Return whether a model is being opened from a checkpoint, whose tensors will be loaded."""
    from_file = model_cfg._get_flag(OPENED) if OmegaConf.is_config(model_cfg) else None
    return bool(from_file or getattr(model_cfg, OPENED, False))


def device_of(root: Any) -> torch.device:
    """Return the device type on which the run computes: cuda if there is a GPU and --cpu is not set."""
    on_gpu = torch.cuda.is_available() and not (root is not None and root.common.cpu)
    return torch.device("cuda" if on_gpu else "cpu")
