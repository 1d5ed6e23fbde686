"""Defines the teacher of distillation, which opens a checkpoint and scores the student's inputs."""

import ast
import copy
import logging
import os
from typing import Any

import torch
from fairseq import checkpoint_utils
from omegaconf import OmegaConf, open_dict
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fairseq_tutel.checkpoint.dictionaries import fingerprints_of, refuse_other_dictionaries
from fairseq_tutel.plugin.distillation_options import DistillationConfig
from fairseq_tutel.plugin.feed_forward import contexts_of, moe_layers
from fairseq_tutel.plugin.options import options_of
from fairseq_tutel.plugin.run_state import config_of

logger = logging.getLogger(__name__)


class Teacher:
    """The frozen teacher model in eval mode; neither the criterion nor checkpoints have its parameters."""

    def __init__(self, options: DistillationConfig, task: Any) -> None:
        self.options, self.task = options, task
        self.overrides: dict[str, Any] = ast.literal_eval(options.distill_teacher_overrides)
        self._model: nn.Module | None = None
        if not os.path.isfile(options.distill_teacher):
            raise ValueError(
                f"--distill-teacher is {options.distill_teacher or 'not given'}, but --criterion "
                "moe_distillation needs a file; give a checkpoint."
            )

    def scores(self, words: tuple, named: dict[str, Any], device: torch.device, dummy: bool) -> Tensor:
        """Run the teacher on the student's inputs without gradients, and return the teacher's scores."""
        if self._model is None:
            self._model = self._opened(device)
        model, dtype = self._model, torch.bfloat16 if self.options.distill_teacher_bf16 else None

        def fitting(value: Any) -> Any:
            is_float = torch.is_tensor(value) and value.is_floating_point()
            return value.to(dtype or torch.float32) if is_float else value

        for context in contexts_of(moe_layers(model)):
            context.begin_step(is_dummy=dummy)
        with torch.no_grad():
            output = model(*tree_map(fitting, words), **tree_map(fitting, named))
            return scores_of(output)

    def _opened(self, device: torch.device) -> nn.Module:
        path = self.options.distill_teacher
        state = checkpoint_utils.load_checkpoint_to_cpu(path, self.overrides)
        state.pop("task_state", None)  # fairseq would load this state into the student's task.
        task = self._task_of()
        # Opening the teacher must not change the random numbers of training.
        with torch.random.fork_rng():
            (model,), _ = checkpoint_utils.load_model_ensemble([path], task=task, state=state)
        extra_state = state.get("extra_state") or {}
        refuse_other_dictionaries(fingerprints_of(model), extra_state, f"--distill-teacher {path}")
        model.requires_grad_(False)
        model.to(device=device, dtype=torch.bfloat16 if self.options.distill_teacher_bf16 else None)
        logger.info("teacher: %s", path)
        return model.eval()

    def _task_of(self) -> Any:
        """Return a copy of the student's task, with the options that the user overrides for the teacher."""
        task, given = copy.copy(self.task), copy.deepcopy(config_of(self.task))
        of_task = {option.key for option in options_of("task")}
        values = {key: value for key, value in self.overrides.items() if key in of_task}
        values["moe_expert_parallel_size"] = self.options.distill_teacher_parallel_size
        if OmegaConf.is_config(given):
            with open_dict(given):
                given.update(values)
        else:
            vars(given).update(values)
        task.is_of_teacher = True
        setattr(task, "args" if getattr(self.task, "cfg", None) is None else "cfg", given)
        return task


def scores_of(output: Any) -> Tensor:
    """Return the scores [N, V] of V words in N rows from a model's output; their softmax is P(word)."""
    first = output if torch.is_tensor(output) else output[0]
    return first.flatten(end_dim=-2)
