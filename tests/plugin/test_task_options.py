"""Every task, with or without a dataclass, has the system options and the run's configuration."""

import argparse

import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf, merge_with_parent
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY, setup_task
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.opening.load import mark_as_opened
from fairseq_tutel.plugin.registration.flags import SystemOptions, defaults
from fairseq_tutel.plugin.registration.wrapped import run_with_root
from fairseq_tutel.plugin.run_state import is_training, root_of

register()


@pytest.mark.parametrize("name", TASK_REGISTRY)
def test_every_task_has_the_system_options(name):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    TASK_REGISTRY[name].add_args(parser)
    actions = {action.dest: action.default for action in parser._actions}
    assert {key: actions[key] for key in defaults(SystemOptions)} == defaults(SystemOptions)
    if name not in TASK_DATACLASS_REGISTRY:
        return
    assert ConfigStore.instance().load(f"task/{name}.yaml").node.moe_zero_stage == 0
    given = DictConfig({"_name": name, "moe_zero_stage": 2})
    cfg = merge_with_parent(TASK_DATACLASS_REGISTRY[name](), given)
    assert (cfg.moe_zero_stage, cfg._name) == (2, name)


def _ranking(folder, *extra):
    """Return the configuration of a fairseq task without a dataclass."""
    for part in ("input0", "label"):
        (folder / part).mkdir(exist_ok=True)
        Dictionary().save(str(folder / part / "dict.txt"))
    parser = options.get_training_parser()
    words = [
        str(folder), "--task", "sentence_ranking", "--num-classes", "2", "--arch", "moe_roberta_base",
        "--criterion", "sentence_ranking", "--optimizer", "adam", "--encoder-layers", "2",
        "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32", "--encoder-attention-heads", "2",
        "--moe-expert-count", "4", "--max-positions", "16", "--batch-size", "2", "--cpu",
    ]  # fmt: skip
    args = options.parse_args_and_arch(parser, [*words, *extra])
    return convert_namespace_to_omegaconf(args)


def _experts(cfg):
    """Build a model as a training run does; return a layer's experts and the task's run configuration."""
    facts = []

    def main(cfg):
        task = setup_task(cfg.task)
        weight = task.build_model(cfg.model).encoder.sentence_encoder.layers[1].fc1.experts.fc1_weight
        facts.extend((weight.detach().clone(), root_of(task), is_training(task, cfg.model)))

    distributed_utils.call_main(cfg, main)
    return facts


def test_a_task_without_a_dataclass_trains_with_the_run_s_configuration(tmp_path):
    cfg = _ranking(tmp_path, "--moe-zero-stage", "0", "--moe-comm-timeout", "77")
    assert isinstance(cfg.task, argparse.Namespace)
    assert cfg.task.moe_comm_timeout == 77
    weight, root, training = _experts(cfg)
    assert training
    assert root is cfg
    assert cfg.optimizer._name == "moe_adam"
    other, *_ = _experts(_ranking(tmp_path, "--seed", "5"))
    same, *_ = _experts(_ranking(tmp_path))
    assert torch.equal(weight, same)
    assert not torch.isclose(weight, other).any()


def test_the_configuration_is_kept_while_main_runs_also_in_spawned_processes(tmp_path):
    task = argparse.Namespace(args=argparse.Namespace())
    assert root_of(task) is None
    cfg = _ranking(tmp_path)

    def main(cfg):
        before = is_training(task, cfg.model)
        mark_as_opened({"args": None, "cfg": cfg})
        return root_of(task), before, is_training(task, cfg.model)

    assert run_with_root(main, cfg) == (cfg, True, False)
    assert root_of(task) is None
