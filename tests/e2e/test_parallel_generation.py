"""Commands that use a model, on ranks that share its experts: what one process gives."""

import re

import pytest
from cli import USER_DIR, fairseq, refused, start, start_each, tail, wait
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
    other = ("--moe-gate-type", "hash", "--moe-expert-count", 2, "--encoder-moe-freq", 2)
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
def test_generate_by_an_ensemble(mt, mt_data, alone, together):
    run = _run("generate", mt_data, _paths(mt), *BEAM, *UNEQUAL, *SHARED)
    assert _hypotheses(run.output) == pytest.approx(together, abs=1e-5)
    assert together != alone
    assert all(_calls(run))  # it made some calls alone, and served some


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_generate_on_four_ranks(mt, mt_data, together, size):
    """Two groups of two, and four ranks for models of four and of two experts, whose are in slices."""
    shared = ("--moe-expert-parallel-size", size)
    run = _run("generate", mt_data, _paths(mt), *BEAM, *UNEQUAL, *shared, ranks=4)
    assert _hypotheses(run.output) == pytest.approx(together, abs=1e-5)


EVAL = ("--gen-subset", "valid", "--tokens-per-sample", 16, "--batch-size", 9)


def test_eval_lm_gives_the_perplexity_of_all_ranks(lm, lm_data):
    one = fairseq("eval-lm", *_words("eval-lm", lm_data, lm, *EVAL))
    two = fairseq("eval-lm", *_words("eval-lm", lm_data, lm, *EVAL, *SHARED), ranks=2)
    loss, perplexity = re.findall(r"Loss \(base 2\): (\S+), Perplexity: (\S+)", one.output)[0]
    tokens = re.search(r"Evaluated ([\d,]+) tokens", one.output)[1]
    said = f"all 2 ranks: {tokens} tokens, Loss (base 2): {loss}, Perplexity: {perplexity}"
    assert said in two.logs[0], tail(two.logs[0])
    part = re.search(r"Evaluated ([\d,]+) tokens", two.logs[0])[1]
    assert part != tokens
    sizes = [
        int(re.search(r"num. model params: ([\d,]+)", run.logs[0])[1].replace(",", ""))
        for run in (one, two)
    ]
    # Two layers of 4 experts with 16 x 32 + 32 x 16 weights and 48 biases: half of them.
    assert sizes[0] - sizes[1] == 2 * 2 * (2 * 16 * 32 + 48)


@pytest.mark.long
def test_validate_gives_the_loss_of_all_ranks(lm, lm_data):
    words = _words("validate", lm_data, lm, "--batch-size", 9, "--log-format", "json")
    one = fairseq("validate", *words)
    two = fairseq("validate", *words, *SHARED, ranks=2)
    expected, found = one.stats("valid")[-1], two.stats("valid")[-1]
    for name in ("valid_loss", "valid_nll_loss", "valid_ppl", "valid_entropy_gating"):
        assert float(found[name]) == pytest.approx(float(expected[name]), rel=1e-3), name
    assert "expert parallel size 2, replicas 1" in two.logs[0]


@pytest.mark.long
def test_interactive_reads_on_one_rank(mt, mt_data, tmp_path):
    (tmp_path / "in.txt").write_text("w1 w3 w9\nw2\n")
    words = ("--input", tmp_path / "in.txt", "--beam", 2, "--max-len-b", 5)
    one = _run("interactive", mt_data, mt[0], *words, ranks=1)
    two = _run("interactive", mt_data, mt[0], *words, *SHARED)
    assert len(_hypotheses(one.output)) == 2
    assert _hypotheses(two.logs[0]) == pytest.approx(_hypotheses(one.output), abs=1e-5)
    assert not _hypotheses(two.logs[1])


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


@pytest.mark.long
def test_ranks_with_different_files_are_told_so(mt, mt_data):
    words = [("generate", *_words("generate", mt_data, path, *SHARED)) for path in mt]
    run = wait(start_each("tutel-run", *words))
    assert 0 not in run.exit_codes
    for log in run.logs:
        assert "[4, 4, 4, 4] on rank 0 and [2, 2, 2] on rank 1" in log, tail(log)


@pytest.mark.long
def test_stock_generate_does_not_let_ranks_meet_and_says_so(mt, mt_data):
    words = _words("generate", mt_data, mt[0], "--beam", 1, "--max-len-b", 2, *UNEQUAL, *SHARED)
    run = fairseq("generate", *words, ranks=2)
    for log in run.logs:
        assert len(_hypotheses(log)) == 21
        assert "this process is not connected to the other ranks" in log


@pytest.mark.long
def test_a_context_window_on_several_ranks_is_refused(lm, lm_data):
    words = _words("eval-lm", lm_data, lm, *EVAL, "--context-window", 4)
    output = refused("eval-lm", *words, ranks=2)
    assert "--context-window is 4, which does not work on several ranks" in output


@pytest.mark.long
def test_eval_lm_without_a_token_is_no_perplexity(lm, lm_data):
    # Longer blocks than the model has positions for are skipped, all of them.
    words = _words("eval-lm", lm_data, lm, "--tokens-per-sample", 4000, "--sample-break-mode", "none")
    output = refused("eval-lm", *words, ranks=2)
    assert "no rank scored a token" in output
