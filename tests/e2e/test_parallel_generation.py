"""Inference commands with experts spread over several ranks give the results of one process."""

import re

import pytest
from cli import USER_DIR, fairseq, start, tail, wait
from faults.trial import PLACES, Trial, environment
from models import lm_args, mt_args

SHARED = ("--moe-expert-parallel-size", 2)
# With batch size 7, 21 sentences form 3 batches for two ranks; with batch size 21, one rank has no batch.
UNEQUAL, ALL_ON_ONE = ("--batch-size", 7), ("--batch-size", 21)


@pytest.fixture(scope="module")
def mt(mt_data, tmp_path_factory):
    """The checkpoint of a pre-gated translation model after one update."""
    folder = tmp_path_factory.mktemp("mt-run")
    flags = ("--moe-checkpoint", "sharded", "--moe-pregate", 1, "--seed", 5, "--disable-validation")
    fairseq("train", *mt_args(mt_data, folder, *flags, updates=1))
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def lm(lm_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm-run")
    fairseq("train", *lm_args(lm_data, folder, "--disable-validation", updates=1))
    return folder / "checkpoint_last.pt"


def _words(command, data, path, *extra):
    task = "moe_language_modeling" if command in ("eval-lm", "validate") else "moe_translation"
    return [
        data, "--user-dir", USER_DIR, "--task", task, "--path", path, "--num-workers", 0,
        "--required-batch-size-multiple", 1, *extra,
    ]  # fmt: skip


def _run(command, *words, ranks=2):
    return fairseq("tutel-run", command, *_words(command, *words), ranks=ranks)


BEAM = ("--beam", 4, "--nbest", 4, "--max-len-b", 12)


def _hypotheses(text):
    """Return the scores of all printed hypotheses, in a dictionary with keys (sentence number, text)."""
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", text, re.M)
    return {(int(i), words): float(score) for i, score, words in found}


def _calls(run):
    """Return how often rank 0 called a MoE layer with tokens, and how often without tokens."""
    (found,) = re.findall(r"ranks: (\d+) layer calls .* tokens, (\d+) for other", run.logs[0])
    return tuple(map(int, found))


@pytest.fixture(scope="module")
def alone(mt, mt_data):
    """The hypotheses that one process generates, and the score of each hypothesis."""
    one = _run("generate", mt_data, mt, *BEAM, *UNEQUAL, ranks=1)
    found = _hypotheses(one.output)
    lengths = {len(words.split()) for _, words in found}
    assert len(found) > 60 and len(lengths) > 4, lengths
    return found


def test_two_ranks_with_unequal_batches_generate_the_output_of_one_process(mt, mt_data, alone, tmp_path):
    results = ("--results-path", tmp_path)
    run = _run("generate", mt_data, mt, *BEAM, *UNEQUAL, *SHARED, *results)
    parts = [_hypotheses((tmp_path / f"rank{rank}" / "generate-test.txt").read_text()) for rank in range(2)]
    assert {i for i, _ in parts[0]}.isdisjoint(i for i, _ in parts[1])
    assert {**parts[0], **parts[1]} == pytest.approx(alone, abs=1e-5)
    assert "expert parallel size 2, replicas 1" in run.logs[0]


def test_generate_works_if_one_rank_has_no_sentence(mt, mt_data, alone):
    run = _run("generate", mt_data, mt, *BEAM, *ALL_ON_ONE, *SHARED)
    assert _hypotheses(run.logs[0]) == pytest.approx(alone, abs=1e-5)
    assert not _hypotheses(run.logs[1])
    assert "rank 1 has no sentences to generate from" in run.logs[1]
    own, served = _calls(run)
    assert own > 0 and served == 0


EVAL = ("--gen-subset", "valid", "--tokens-per-sample", 16, "--batch-size", 9)


def test_eval_lm_spreads_sentences_and_experts_over_ranks(lm, lm_data):
    one = fairseq("eval-lm", *_words("eval-lm", lm_data, lm, *EVAL))
    two = fairseq("eval-lm", *_words("eval-lm", lm_data, lm, *EVAL, *SHARED), ranks=2)
    whole, part = (
        int(re.search(r"Evaluated ([\d,]+) tokens", run.logs[0])[1].replace(",", "")) for run in (one, two)
    )
    assert 0 < part < whole
    sizes = [
        int(re.search(r"num. model params: ([\d,]+)", run.logs[0])[1].replace(",", ""))
        for run in (one, two)
    ]
    # Each rank lacks 2 of 4 experts in each of 2 layers; an expert has 2 x 16 x 32 weights and 48 biases.
    assert sizes[0] - sizes[1] == 2 * 2 * (2 * 16 * 32 + 48)


def test_a_failing_rank_ends_generation_on_all_ranks(mt, mt_data, tmp_path):
    flags = (*UNEQUAL, *SHARED, "--moe-comm-timeout", 1, "--user-dir", PLACES)
    env = environment(tmp_path, Trial(what="error", place="generate", rank=1))
    run = wait(start("tutel-run", "generate", *_words("generate", mt_data, mt, *flags), ranks=2, env=env))
    assert 0 not in run.exit_codes
    assert "an injected fault" in run.logs[1].splitlines()[-1]
    assert "error: rank 0 " in run.logs[0]
    assert "rank 1 failed: OSError: [Errno 5] an injected fault" in run.logs[0], tail(run.logs[0])
