"""Runs the main function of fairseq's commands: distributed start, checks of options, state of the run."""

import functools
from typing import Any

from fairseq.distributed import utils as distributed_utils
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.utils import import_user_module

from fairseq_tutel import plugin
from fairseq_tutel.plugin.opening.several_ranks import run_on_several_ranks
from fairseq_tutel.plugin.registration.flags import drop_suggestions, warn_of_given
from fairseq_tutel.plugin.registration.process import refusals_are_sentences
from fairseq_tutel.plugin.registration.variants import give_system_options
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training import startup
from fairseq_tutel.plugin.training.save import run_training
from fairseq_tutel.ranks import rendezvous, world
from fairseq_tutel.ranks.guard import guarded, keeps_the_store


def call_main(original: Any) -> Any:
    """Wrap fairseq's `call_main`; see item 5 of `wrapped.py`."""

    @functools.wraps(original)
    @refusals_are_sentences()
    def wrapper(cfg: Any, main: Any, **kwargs: Any) -> Any:
        distributed = cfg.distributed_training
        startup.drop_tpu(cfg)
        startup.join_torchrun(cfg)
        if distributed.distributed_init_method is None:
            distributed_utils.infer_init_method(distributed)
        run: Any = run_on_several_ranks
        if cfg.common_eval.path is None:
            run = run_training
            # torch >= 2.6 refuses the unpickler of fairseq's broadcast, so every rank reads the checkpoint.
            cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True
        if distributed.distributed_init_method == "env://" and keeps_the_store():
            distributed.distributed_init_method = rendezvous.METHOD
        # A partial can be pickled for processes that fairseq spawns.
        on_each = functools.partial(run_with_root, functools.partial(run, main))
        with guarded("a collective of fairseq's own", timed=False), startup.meeting_of(cfg) as met:

            def met_main(*args: Any, **kwargs: Any) -> Any:
                met()
                return on_each(*args, **kwargs)

            return original(cfg, met_main if met else on_each, **kwargs)

    return wrapper


def run_with_root(main: Any, cfg: Any, **kwargs: Any) -> Any:
    """Run a command's main function while `RUN` has its FairseqConfig."""
    import_user_module(cfg.common)  # hydra does not; it may register tasks
    # A spawned rank has imported this file, so fairseq skips a --user-dir that is the package.
    plugin.register()
    drop_suggestions()
    give_system_options()
    _check_model(cfg)
    with RUN.having(cfg=cfg):
        return main(cfg, **kwargs)


def _check_model(cfg: Any) -> None:
    """Refuse data-parallel wrappers that break a training run's experts; warn of options without effect."""
    if cfg.common_eval.path is not None:
        return
    name = getattr(cfg.model, "ensemble_arch", None) or getattr(cfg.model, "_name", None)
    model = ARCH_MODEL_REGISTRY.get(name, MODEL_REGISTRY.get(name))
    backend = str(cfg.distributed_training.ddp_backend)
    if not getattr(model, "has_experts", model is None):
        if world.is_first():
            warn_of_given(cfg.task, f"--arch {name}")
    elif backend in ("fully_sharded", "slowmo"):
        raise ValueError(
            f"--ddp-backend is {backend}, which would shard or average experts as if they were "
            "replicas; use legacy_ddp, or pytorch_ddp on a GPU."
        )
