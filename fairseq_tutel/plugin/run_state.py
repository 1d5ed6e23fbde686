"""Holds the state of the current run: its configuration, topology, checkpoint and open models.

fairseq passes no common object from a command's main function to models, tasks, optimizers and checkpoint
functions, so they share `RUN`. It is the only file outside of plugin/optim that plugin/optim imports from
plugin/.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from omegaconf import OmegaConf

from fairseq_tutel.moe.option_table import StoreConfig
from fairseq_tutel.parallel.groups import Topology

if TYPE_CHECKING:
    from fairseq_tutel.inference.expert_store import ExpertStore
    from fairseq_tutel.parallel.signals import SignalWatch
    from fairseq_tutel.plans.files import PlacedPlan
    from fairseq_tutel.plugin.opening.several_ranks import Command
    from fairseq_tutel.plugin.training.background_save import BackgroundSave


@dataclass
class RunState:
    """The state that all parts of the fairseq integration share during a run."""

    cfg: Any = None  # FairseqConfig of the current command
    # Process groups of the model that was built last; teachers are excluded.
    topology: Topology = field(default_factory=Topology)
    checkpoint: str | None = None  # path of the checkpoint from which training resumes
    is_saving: bool = False  # whether all ranks are writing a checkpoint
    background: "BackgroundSave | None" = None  # saves in threads, with --moe-save-async
    num_saves: int = 0  # calls of fairseq's save_checkpoint that have ended
    signals: "SignalWatch | None" = None  # receives the signals that end the run
    command: "Command | None" = None  # the command, if it uses models on several ranks
    opens_teacher: bool = False  # whether a teacher model is being opened, which training calls
    stores: "WeakValueDictionary[StoreConfig, ExpertStore]" = field(default_factory=WeakValueDictionary)
    # Collective plans by path, kept because a file may change after it was checked.
    plans: "dict[str, tuple[PlacedPlan, ...]]" = field(default_factory=dict)
    # Functions to call before the last error line.
    at_exit: list[Callable[[], None]] = field(default_factory=list)

    def update(self, **values: Any) -> None:
        """Set the given fields of this object."""
        vars(self).update(values)

    @contextmanager
    def having(self, **values: Any) -> Iterator[None]:
        """Context manager that sets fields of this object for its block and restores them afterwards."""
        before = {name: getattr(self, name) for name in values}
        self.update(**values)
        try:
            yield
        finally:
            self.update(**before)


RUN = RunState()

# Flag that marks a configuration that was read from a checkpoint, and the key of its `Saved`.
OPENED = "opened_for_use"


def config_of(task: Any) -> Any:
    """Return a task's configuration: `cfg`, or `args` in fairseq's older tasks."""
    cfg = getattr(task, "cfg", None)
    return getattr(task, "args", None) if cfg is None else cfg


def language_pair(task_cfg: Any) -> str:
    """Return the language pair of a task's configuration, such as de-en; "" if it lacks a language."""
    languages = [getattr(task_cfg, key, None) for key in ("source_lang", "target_lang")]
    return "-".join(map(str, languages)) if all(languages) else ""


def root_of(task: Any) -> Any:
    """Return the FairseqConfig of a task's run, or None if the task was built outside of a run."""
    cfg = config_of(task)  # for a task without a dataclass, the command line, which has no root
    root = cfg._get_root() if hasattr(cfg, "_get_root") else None
    return RUN.cfg if root is None or "distributed_training" not in root else root


def is_training(task: Any, model_cfg: Any) -> bool:
    """Return whether the model that is being built will be trained, rather than opened for use."""
    return not is_opened(model_cfg) and root_of(task) is not None


def is_opened(model_cfg: Any) -> bool:
    """Return whether a model is being opened from a checkpoint, whose tensors will be loaded."""
    from_file = model_cfg._get_flag(OPENED) if OmegaConf.is_config(model_cfg) else None
    return bool(from_file or getattr(model_cfg, OPENED, False))


def opened_from(model_cfg: Any) -> Any:
    """Return the `Saved` of the checkpoint from which a model is being opened, or None."""
    if not OmegaConf.is_config(model_cfg):
        return getattr(model_cfg, OPENED, None) or None
    found = model_cfg._get_root().get(OPENED)
    return OmegaConf.to_container(found) if OmegaConf.is_config(found) else None


def device_of(root: Any) -> torch.device:
    """Return the device type on which the run computes: cuda if there is a GPU and --cpu is not set."""
    on_gpu = torch.cuda.is_available() and not (root is not None and root.common.cpu)
    return torch.device("cuda" if on_gpu else "cpu")
