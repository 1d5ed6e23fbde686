"""Commands that use a model, on ranks that share its experts: what one process gives."""

import re

import pytest
from cli import USER_DIR, fairseq, start, tail, wait
from models import lm_args, mt_args
from test_checkpoints import FAULTY
from tool_in_process import convert

PREGATED = ("--moe-pregate", 1)
SHARED = ("--moe-expert-parallel-size", 2)
# Of 21 sentences: 3 batches for 2 ranks, and one, so that a rank has none.
UNEQUAL, ALL_ON_ONE = ("--batch-size", 7), ("--batch-size", 21)


@pytest.fixture(scope="module")
def mt(mt_data, tmp_path_factory):
    """Two translation models with other experts in other layers; hardly trained, their lengths differ."""
    folder = tmp_path_factory.mktemp("mt-run")
    fairseq(
        "train",
        *mt_args(mt_data, folder / "a", "--moe-checkpoint", "sharded", *PREGATED, "--seed", 5, updates=1),
    )
    other = ("--moe-gate-type", "cosine", "--moe-expert-count", 2, "--encoder-moe-freq", 2)
    fairseq("train", *mt_args(mt_data, folder / "b", *other, "--seed", 3, updates=1))
    return [folder / name / "checkpoint_last.pt" for name in "ab"]


@pytest.fixture(scope="module")
def lm(lm_data, tmp_path_factory):
    """A conventional model, made pre-gated and fine-tuned."""
    folder = tmp_path_factory.mktemp("lm-run")
    fairseq("train", *lm_args(lm_data, folder / "a", "--moe-checkpoint", "sharded", updates=3))
    old, new = folder / "a" / "checkpoint_last.pt", folder / "made.pt"
    convert("pregate", "--input", old, "--output", new, *PREGATED)
    words = (*PREGATED, "--finetune-from-model", new)
    run = fairseq("train", *lm_args(lm_data, folder / "b", *words, updates=3))
    assert "Loaded checkpoint" in run.output and "was trained with" not in run.output
    return folder / "b" / "checkpoint_last.pt"


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
    """Return the scores by sentence and words."""
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", text, re.M)
    return {(int(i), words): float(score) for i, score, words in found}


def _calls(run):
    """Return the first rank's calls of layers: its own, and those that it served."""
    (found,) = re.findall(r"ranks: (\d+) layer calls .* tokens, (\d+) for other", run.logs[0])
    return tuple(map(int, found))


def _paths(mt):
    return ":".join(map(str, mt))


@pytest.fixture(scope="module")
def alone(mt, mt_data):
    """What one process says, of the first model."""
    one = _run("generate", mt_data, mt[0], *BEAM, *UNEQUAL, ranks=1)
    found = _hypotheses(one.output)
    lengths = {len(words.split()) for _, words in found}
    assert len(found) > 60 and len(lengths) > 4, lengths
    return found


@pytest.fixture(scope="module")
def together(mt, mt_data):
    """The same, of the ensemble."""
    both = _run("generate", mt_data, _paths(mt), *BEAM, *UNEQUAL, ranks=1)
    return _hypotheses(both.output)


def test_generate_with_more_batches_on_one_rank(mt, mt_data, alone, tmp_path):
    results = ("--results-path", tmp_path)
    run = _run("generate", mt_data, mt[0], *BEAM, *UNEQUAL, *SHARED, *results)
    parts = [_hypotheses((tmp_path / f"rank{rank}" / "generate-test.txt").read_text()) for rank in range(2)]
    assert {i for i, _ in parts[0]}.isdisjoint(i for i, _ in parts[1])
    assert {**parts[0], **parts[1]} == pytest.approx(alone, abs=1e-5)
    assert "expert parallel size 2, replicas 1" in run.logs[0]


def test_generate_where_a_rank_has_no_sentence(mt, mt_data, alone):
    run = _run("generate", mt_data, mt[0], *BEAM, *ALL_ON_ONE, *SHARED)
    assert _hypotheses(run.logs[0]) == pytest.approx(alone, abs=1e-5)
    assert not _hypotheses(run.logs[1])
    assert "rank 1 has no sentences to generate from" in run.logs[1]
    own, served = _calls(run)
    assert own > 0 and served == 0


@pytest.mark.long
def test_generate_on_four_ranks(mt, mt_data, together):
    """For models of four experts and of two, which are in shards."""
    shared = ("--moe-expert-parallel-size", 4)
    run = _run("generate", mt_data, _paths(mt), *BEAM, *UNEQUAL, *shared, ranks=4)
    assert _hypotheses(run.output) == pytest.approx(together, abs=1e-5)
    assert all(_calls(run))  # it made some calls alone, and joined some


EVAL = ("--gen-subset", "valid", "--tokens-per-sample", 16, "--batch-size", 9)


def test_a_rank_of_eval_lm_has_its_sentences_and_its_experts(lm, lm_data):
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
    # Two layers of 4 experts with 16 x 32 + 32 x 16 weights and 48 biases: half of them.
    assert sizes[0] - sizes[1] == 2 * 2 * (2 * 16 * 32 + 48)


def test_a_failing_rank_ends_the_command(mt, mt_data):
    words = _words(
        "generate", mt_data, mt[0], *UNEQUAL, *SHARED, "--moe-comm-timeout", 1, "--user-dir", FAULTY
    )
    env = {"FAULT": "generate:1:error", "FAULT_RANK": "1"}
    run = wait(start("tutel-run", "generate", *words, ranks=2, env=env))
    assert 0 not in run.exit_codes
    assert "a broken sample" in run.logs[1].splitlines()[-1]
    assert "error: rank 0 " in run.logs[0]
    assert "rank 1 failed: KeyError: 'a broken sample'" in run.logs[0], tail(run.logs[0])
