"""The fork server's prepared configurations equal hydra's, and its children can use a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

LM = ("--task", "moe_language_modeling", "--arch", "moe_transformer_lm")
MT = ("--task", "moe_translation", "--arch", "moe_transformer_iwslt_de_en")
CRITERION = ("--criterion", "moe_label_smoothed_cross_entropy", "--label-smoothing", "0.1")


def compare(words):
    """Return whether a prepared configuration was used, and whether it equals hydra's."""
    from fairseq import options
    from fairseq.dataclass import utils

    from tests.helpers import warm

    args = options.parse_args_and_arch(options.get_training_parser(), ["data", *words])
    before = len(warm._composed)
    found = utils.convert_namespace_to_omegaconf(args)
    is_taken = len(warm._composed) < before
    utils.compose = warm._compose
    try:
        return is_taken, found == utils.convert_namespace_to_omegaconf(args)
    finally:
        utils.compose = warm.compose


def test_a_prepared_configuration_equals_hydra_s(ranks):
    moved = ("--momentum", "0.9", "--lr", "0.5", "--moe-balance-loss", "gshard_all:1,z:0.1")
    words = (*LM, "--criterion", "moe_cross_entropy", "--optimizer", "moe_sgd", *moved)
    assert ranks(2).run(compare, words) == [(True, True)] * 2
    words = (*MT, *CRITERION, "--optimizer", "moe_adam", "--encoder-layers", "3", "--lr", "0.1,0.2")
    assert ranks(2).run(compare, words) == [(True, True)] * 2
    assert ranks(2).run(compare, words) == [(False, True)] * 2  # each prepared configuration is used once


# Imports what the server imports, in a process that claims to have a GPU.
IMPORT_ALL = """
import importlib, traceback
import torch
from tests.helpers.forkserver import PRELOADED

def initialises(*_):
    traceback.print_stack()
    raise SystemExit("CUDA was initialised, which then fails in every forked child")

torch.cuda.device_count = lambda: 1  # reads the driver's library without initialising it
torch.cuda.is_available = torch.cuda._lazy_init = initialises
for module in PRELOADED:
    importlib.import_module(module)
"""


def test_the_fork_server_does_not_initialise_cuda():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
