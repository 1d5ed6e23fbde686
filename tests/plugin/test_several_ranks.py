"""Tests which of fairseq's commands the plugin runs on several ranks."""

import pickle

import pytest
from fairseq.dataclass.configs import FairseqConfig
from fairseq_cli import validate
from omegaconf import OmegaConf

from fairseq_tutel import plugin
from fairseq_tutel.plugin.opening import several_ranks
from fairseq_tutel.plugin.registration import wrapped

plugin.register()


@pytest.mark.parametrize("path", [None, "a.pt"])
def test_only_commands_that_load_a_model_run_on_several_ranks(path):
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.common_eval.path = path
    cfg.model = None
    called = []
    wrapped.call_main(lambda cfg, main: called.append(main))(cfg, validate.main)
    run = pickle.loads(pickle.dumps(called[0])).args[0]  # fairseq pickles the main function to spawn ranks
    assert (run.func is several_ranks.run_on_several_ranks) == (path is not None)
    assert run.args == (validate.main,)


def test_a_command_on_one_rank_runs_fairseq_s_main_function():
    said = []
    several_ranks.run_on_several_ranks(
        lambda cfg, **kwargs: said.append((cfg, kwargs, several_ranks.running_command())), 1, a=2
    )
    assert said == [(1, {"a": 2}, None)]
