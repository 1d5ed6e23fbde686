"""State of the run in this process: its configuration, topology, checkpoint and open models.

fairseq passes no object from a command's main function on to models, tasks, optimizers and checkpoint
functions, so these share `RUN`. It is the only file of this folder that optim/ imports.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from omegaconf import OmegaConf

from fairseq_tutel.moe.option_table import StoreConfig
from fairseq_tutel.ranks.groups import Topology

if TYPE_CHECKING:
    from fairseq_tutel.checkpoint.lease import Lease
    from fairseq_tutel.inference.expert_store import ExpertStore
    from fairseq_tutel.plans.files import PlacedPlan
    from fairseq_tutel.plugin.opening.several_ranks import Command


@dataclass
class RunState:
    """What the parts of the integration share during a run."""

    cfg: Any = None  # FairseqConfig of the main function that runs
    # Process groups of the model that was built last; teachers are excluded.
    topology: Topology = field(default_factory=Topology)
    checkpoint: str | None = None  # path that training resumes from
    lease: "Lease | None" = None  # of --save-dir, on the rank that writes there
    is_saving: bool = False  # a checkpoint of all ranks is being written
    command: "Command | None" = None  # that uses models on several ranks
    opens_teacher: bool = False  # a model is being opened that is called in step with training
    stores: "WeakValueDictionary[StoreConfig, ExpertStore]" = field(default_factory=WeakValueDictionary)
    # Collective plans by path; a file may change after it was checked.
    plans: "dict[str, tuple[PlacedPlan, ...]]" = field(default_factory=dict)
    # Functions to call before the last error line.
    at_exit: list[Callable[[], None]] = field(default_factory=list)

    def update(self, **values: Any) -> None:
        """Set fields."""
        vars(self).update(values)

    @contextmanager
    def having(self, **values: Any) -> Iterator[None]:
        """Set fields in the block, and restore them afterwards."""
        before = {name: getattr(self, name) for name in values}
        self.update(**values)
        try:
            yield
        finally:
            self.update(**before)


RUN = RunState()

# Flag of a configuration that was read from a checkpoint.
OPENED = "opened_for_use"


def config_of(task: Any) -> Any:
    """Return a task's configuration; fairseq's older tasks keep it in `args`."""
    cfg = getattr(task, "cfg", None)
    return getattr(task, "args", None) if cfg is None else cfg


def root_of(task: Any) -> Any:
    """Return the run's FairseqConfig, or None where the task was built outside of a run."""
    cfg = config_of(task)  # the command line, without a root, for a task without a dataclass
    root = cfg._get_root() if hasattr(cfg, "_get_root") else None
    return RUN.cfg if root is None or "distributed_training" not in root else root


def is_training(task: Any, model_cfg: Any) -> bool:
    """Whether the model that is being built will be trained, and is not opened from a checkpoint."""
    return not is_opened(model_cfg) and root_of(task) is not None


def is_opened(model_cfg: Any) -> bool:
    """Whether a model's configuration comes from a checkpoint, whose tensors will be loaded."""
    from_file = model_cfg._get_flag(OPENED) if OmegaConf.is_config(model_cfg) else None
    return bool(from_file or getattr(model_cfg, OPENED, False))


def device_of(root: Any) -> torch.device:
    """Return the kind of device that the run will use."""
    on_gpu = torch.cuda.is_available() and not (root is not None and root.common.cpu)
    return torch.device("cuda" if on_gpu else "cpu")
