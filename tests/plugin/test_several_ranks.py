"""Commands on several ranks: what is pickled for them, which are wrapped, the tokens of a perplexity."""

import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq_cli import eval_lm, validate
from omegaconf import OmegaConf

from fairseq_tutel import plugin
from fairseq_tutel.plugin.opening import several_ranks
from fairseq_tutel.plugin.opening.several_ranks import Scored
from fairseq_tutel.plugin.registration import wrapped

plugin.register()


@pytest.mark.parametrize("path", [None, "a.pt"])
def test_only_commands_that_use_models_run_on_several_ranks(path):
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.common_eval.path = path
    cfg.model = None
    called = []
    wrapped.call_main(lambda cfg, main: called.append(main))(cfg, validate.main)
    run = pickle.loads(pickle.dumps(called[0])).args[0]  # as a rank gets it that fairseq spawns
    assert (run.func is several_ranks.run_on_several_ranks) == (path is not None)
    assert run.args == (validate.main,)


def test_on_one_rank_main_is_called_and_no_more():
    said = []
    several_ranks.run_on_several_ranks(
        lambda cfg, **kwargs: said.append((cfg, kwargs, several_ranks.running_command())), 1, a=2
    )
    assert said == [(1, {"a": 2}, None)]


class _Even:
    """A model to which all words are as likely."""

    def __init__(self, words):
        self.words = words

    def eval(self):
        pass

    def __call__(self, src_tokens):
        return torch.zeros(*src_tokens.shape, self.words), None

    def get_normalized_probs(self, out, log_probs, sample):
        return out[0].log_softmax(-1)


@pytest.mark.parametrize(
    ("mark", "has_bos", "has_eos", "expected"),
    [
        (None, False, True, 11),
        ("@@ ", False, True, 8),
        (None, True, True, 9),
        # A block that ends within a word: its last piece counts.
        ("@@ ", False, False, 6),
    ],
)
def test_the_tokens_are_those_that_fairseq_divides_by(mark, has_bos, has_eos, expected):
    dictionary = Dictionary()
    for word in ("a", "b@@", "c", "d@@"):
        dictionary.add_symbol(word)
    first = "<s> " if has_bos else "a "
    lines = [first + "b@@ c a c", first + "d@@ b@@" + " c" * has_eos]
    targets = [
        dictionary.encode_line(line, add_if_not_exist=False, append_eos=has_eos).long() for line in lines
    ]
    target = torch.nn.utils.rnn.pad_sequence(targets, True, dictionary.pad())
    sample = {"id": [0, 1], "ntokens": 11, "target": target, "net_input": {"src_tokens": target}}
    cfg = SimpleNamespace(
        task=SimpleNamespace(add_bos_token=has_bos), common_eval=SimpleNamespace(post_process=mark)
    )
    batches = Scored([sample, {}], dictionary, cfg)
    found = eval_lm.eval_lm(
        models=[_Even(len(dictionary))],
        source_dictionary=dictionary,
        batch_iterator=batches,
        post_process=mark,
        remove_bos_token=has_bos,
        device=torch.device("cpu"),
    )
    scored = target.ne(dictionary.pad()).sum() - 2 * has_bos
    assert len(batches) == 2
    assert batches.tokens == expected
    assert float(found["loss"]) == pytest.approx(math.log2(len(dictionary)) * float(scored) / expected)
