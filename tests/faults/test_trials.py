"""Training runs on two ranks with one fault each: error messages, checkpoints, and the continued run."""

import os

import pytest
from corpora import language

from .trial import Trial, carry_out, train

# Options for sharded checkpoints that are written in the background.
BACKGROUND = ("--moe-checkpoint", "sharded", "--moe-save-async")
RANK_1 = r"rank 1\b"
TRIALS = {
    "a rank is killed in a copy": Trial(what="kill", place="copy", when=3, says=r"rank 0\b"),
    "a rank is killed before ranks meet": Trial(what="kill", place="import", rank=1),
    "all ranks are killed in a background save": Trial(
        what="kill", place="shard", when=6, rank=1, everywhere=True, flags=BACKGROUND
    ),
    "a rank stops in a collective": Trial(
        what="stop", place="collective", when=100, rank=1, begun=True, says=RANK_1
    ),
    "the disk fails": Trial(what="error", place="write", when=2, says="could not be written"),
    "NaN, and other ranks": Trial(
        what="nan", place="train", when=3, rank=1, begun=True, ranks_after=1, says="became NaN or infinite"
    ),
    "an empty batch": Trial(
        what="empty", place="samples", when=2, rank=1, begun=True, outcome="continued", exact=False
    ),
    "a flipped bit": Trial(what="flip", begun=True, says="which is corrupt"),
    "a removed file": Trial(what="remove", begun=True, outcome="continued", says="training resumes from"),
}
QUICK = ("a flipped bit",)  # tests/e2e tests other faults


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return the corpus, and a cached function that trains without a fault."""
    folder = tmp_path_factory.mktemp("faults")
    os.environ.setdefault("FAIRSEQ_TUTEL_TEST_LOGS", str(folder / "logs"))
    data, made = language(tmp_path_factory.mktemp("corpus")), {}

    def undisturbed(flags, updates):
        if (flags, updates) not in made:
            save_dir = tmp_path_factory.mktemp("undisturbed") / "save"
            job = train(data, save_dir, 2, flags, updates)
            assert not any(job.codes), job.text[-2000:]
            made[flags, updates] = save_dir
        return made[flags, updates]

    return data, undisturbed


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in TRIALS]
)
def test_a_run_with_a_fault_ends_with_an_error_or_continues_and_loses_nothing(name, shared, tmp_path):
    data, undisturbed = shared
    carry_out(TRIALS[name], data, tmp_path, undisturbed)
