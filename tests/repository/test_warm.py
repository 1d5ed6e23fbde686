"""The tests' own short way: what the fork server composed before a command's words are known is hydra's."""

import pytest

pytest.importorskip("fairseq")

LM = ("--task", "moe_language_modeling", "--arch", "moe_transformer_lm")
MT = ("--task", "moe_translation", "--arch", "moe_transformer_iwslt_de_en")
CRITERION = ("--criterion", "moe_label_smoothed_cross_entropy", "--label-smoothing", "0.1")


def compare(words):
    """Return whether a prepared configuration was taken, and whether it is the one that hydra composes."""
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


def test_a_prepared_configuration_is_hydra_s(ranks):
    moved = ("--momentum", "0.9", "--lr", "0.5", "--moe-balance-loss", "gshard_all:1,z:0.1")
    words = (*LM, "--criterion", "moe_cross_entropy", "--optimizer", "moe_sgd", *moved)
    assert ranks(2).run(compare, words) == [(True, True)] * 2
    words = (*MT, *CRITERION, "--optimizer", "moe_adam", "--encoder-layers", "3", "--lr", "0.1,0.2")
    assert ranks(2).run(compare, words) == [(True, True)] * 2
    assert ranks(2).run(compare, words) == [(False, True)] * 2  # each serves once
