"""register(): everything a `--user-dir` import does, once.

The folders follow a run's life cycle:

- registration/: options, registered classes, wrapped functions of fairseq, error sentences;
- install.py with feed_forward.py, context.py, announce.py: a stock model gets experts;
- training/: checks, start, the task, resuming, saving;
- opening/: a checkpoint is loaded for use, offloaded, or shared by several ranks;
- run_state.py: shared state.
"""

import importlib
import sys

from fairseq_tutel.plugin.registration import command_line
from fairseq_tutel.plugin.registration.memory import keep_freed_memory

__all__ = ["keep_freed_memory", "register"]

_registered = False


def register() -> None:
    """Register models, criterions, tasks and optimizers with fairseq and wrap a few of its functions.

    Raises:
        ImportError: fairseq is missing or has an unsupported version.
    """
    global _registered
    if _registered:
        return
    _check_fairseq()
    from fairseq.data import Dictionary  # checkpoints of speech tasks contain it

    from fairseq_tutel.checkpoint.files import let_checkpoints_load

    let_checkpoints_load(Dictionary)
    keep_freed_memory()
    _registered = True  # the models folder calls this function, too
    try:
        for module in ("plugin.registration.wrapped", "optim", "criterions", "tasks", "models"):
            importlib.import_module(f"fairseq_tutel.{module}")
    except ImportError:
        _registered = False
        raise
    if command_line.has_user_dir(sys.argv):  # else it is another program's command line
        command_line.check(sys.argv)


def _check_fairseq() -> None:
    try:
        import fairseq
    except ImportError as error:
        raise ImportError(
            "fairseq is not installed; `pip install fairseq-fixed 'numpy<2'` (it imports as fairseq)."
        ) from error
    if hasattr(fairseq, "modules") and hasattr(fairseq.modules, "moe"):
        raise ImportError(
            "this fairseq is Meta's moe branch, whose MoE layers clash with the plugin's; install the "
            "main line: `pip install fairseq-fixed`."
        )
    found = fairseq.__version__
    if not found.startswith("0.12."):
        raise ImportError(
            f"fairseq is version {found}; fairseq_tutel needs 0.12 (PyPI package fairseq-fixed)."
        )
