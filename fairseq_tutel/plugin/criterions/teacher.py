"""The teacher model for distillation: opens its checkpoint and runs it on the student's inputs."""

import ast
import contextlib
import copy
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from omegaconf import OmegaConf, open_dict
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fairseq_tutel.plugin.distillation_options import DistillationConfig
from fairseq_tutel.plugin.feed_forward import contexts_of, moe_layers, unwrapped
from fairseq_tutel.plugin.options import options_of
from fairseq_tutel.plugin.run_state import config_of

logger = logging.getLogger(__name__)

FLAG = "--distill-teacher"
# For encoder and decoder: the attribute of the task that holds the dictionary.
EMBEDDINGS = {"encoder": "source_dictionary", "decoder": "target_dictionary"}


class Teacher:
    """The frozen teacher model, in eval mode; neither criterion nor checkpoints have its parameters."""

    def __init__(self, options: DistillationConfig, task: Any) -> None:
        self.options, self.task, self.overrides = options, task, _read(options)
        self._model: nn.Module | None = None
        if not options.distill_teacher:
            raise ValueError(
                "--criterion moe_distillation needs a teacher; give --distill-teacher CHECKPOINT."
            )
        if not os.path.isfile(options.distill_teacher):
            raise ValueError(
                f"{FLAG} is {options.distill_teacher}, which is not a file; give a checkpoint."
            )

    def scores(self, words: tuple, named: dict[str, Any], device: torch.device, dummy: bool) -> Tensor:
        """Run the teacher on the student's inputs without gradients, and return its scores [N, V]."""
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
            return scores_of(model, output)

    def _opened(self, device: torch.device) -> nn.Module:
        path = self.options.distill_teacher
        state = checkpoint_utils.load_checkpoint_to_cpu(path, self.overrides)
        refuse_others(path, state, self.task)
        state.pop("task_state", None)  # the student's task has its own state
        task = self._task_of()
        # Opening the teacher must not change the random numbers of training.
        with torch.random.fork_rng():
            (model,), _ = checkpoint_utils.load_model_ensemble([path], task=task, state=state)
        model.requires_grad_(False)
        model.to(device=device, dtype=torch.bfloat16 if self.options.distill_teacher_bf16 else None)
        logger.info("teacher: %s", path)
        return model.eval()

    def _task_of(self) -> Any:
        """Return a copy of the student's task with the teacher's overrides, for building the teacher."""
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


def _read(options: DistillationConfig) -> dict[str, Any]:
    found = None
    with contextlib.suppress(SyntaxError, ValueError):
        found = ast.literal_eval(options.distill_teacher_overrides)
    if not isinstance(found, dict):
        raise ValueError(
            f"--distill-teacher-overrides is {options.distill_teacher_overrides!r}; give a dictionary, "
            "such as {'moe_expert_store': 'on-demand'}."
        )
    return found


def refuse_others(path: str, state: Any, task: Any) -> None:
    """Raise ValueError if the teacher's task or dictionary differs from the student's.

    A checkpoint has only the dictionary's size. Words are compared if the teacher's data still exists.
    """
    of_teacher, of_student = state["cfg"]["task"], config_of(task)
    names = [
        str(getattr(cfg, "_name", None) or getattr(cfg, "task", "")).removeprefix("moe_")
        for cfg in (of_teacher, of_student)
    ]
    if names[0] != names[1]:
        raise ValueError(
            f"{FLAG} is {path}, a model of the task {names[0]}, but the student's task is {names[1]}; give "
            "a teacher with the same task."
        )
    for side, key in EMBEDDINGS.items():
        dictionary = getattr(task, key, None)
        embedding = state["model"].get(f"{side}.embed_tokens.weight")
        if dictionary is None:
            continue
        if embedding is not None and len(embedding) != len(dictionary):
            raise ValueError(
                f"{FLAG} is {path}, which has {len(embedding):,} words, but the student's dictionary has "
                f"{len(dictionary):,}; give a teacher with the same dictionary."
            )
        file = _dictionary_of(of_teacher, side)
        words = Dictionary.load(str(file)).symbols if file.is_file() else []
        if words != dictionary.symbols[: len(words)]:
            raise ValueError(
                f"{FLAG} is {path}, which was trained with the dictionary {file}, but the student has a "
                "different dictionary; give a teacher with the same dictionary."
            )


def _dictionary_of(cfg: Any, side: str) -> Path:
    """Return the path of the encoder's or decoder's dictionary file, which may no longer exist."""
    folder = Path(str(getattr(cfg, "data", None) or "").partition(os.pathsep)[0])
    language = getattr(cfg, "source_lang" if side == "encoder" else "target_lang", None)
    return folder / (f"dict.{language}.txt" if language else "dict.txt")


def scores_of(model: Any, output: Any) -> Tensor:
    """Return scores [N, V] from a model's output; the softmax of a row gives the model's probabilities."""
    first = output if torch.is_tensor(output) else output[0]
    first = first.flatten(end_dim=-2)
    adaptive = getattr(getattr(unwrapped(model), "decoder", None), "adaptive_softmax", None)
    if adaptive is None:
        return first
    # fairseq's own log-probabilities have no gradient, and cover only the words of the target's cluster.
    log = partial(torch.log_softmax, dim=1, dtype=torch.float32)
    tails = [log(tail(first)) for tail in adaptive.tail]
    head, *priors = log(adaptive.head(first)).split([adaptive.cutoff[0], *[1] * len(tails)], dim=1)
    return torch.cat([head, *map(torch.add, priors, tails)], dim=1)
