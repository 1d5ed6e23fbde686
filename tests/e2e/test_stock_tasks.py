"""Tasks without a dataclass (fairseq's or a user's) train MoE models on several ranks."""

import shutil
from pathlib import Path

import pytest
from cli import fairseq
from equality import same_training
from models import mt_args

OWN_DIR = str(Path(__file__).parent / "task_user_dir")


TASKS = {
    "translation_multi_simple_epoch": (
        "--langs", "de,en", "--lang-pairs", "de-en,en-de", "--encoder-langtok", "src",
    ),
    "own_translation": ("--user-dir", OWN_DIR),
}  # fmt: skip


@pytest.mark.parametrize(
    "task", [pytest.param("own_translation", marks=pytest.mark.long), next(iter(TASKS))]
)
def test_a_task_without_a_dataclass_trains_the_same_model_on_one_and_two_ranks(task, mt_data, tmp_path):
    def train(folder, *extra, updates=4, **kwargs):
        words = ("--task", task, *TASKS[task], "--optimizer", "sgd", "--lr", 0.5, *extra)
        return fairseq("train", *mt_args(mt_data, tmp_path / folder, *words, updates=updates), **kwargs)

    train("one", "--update-freq", 2)
    train("two", "--moe-checkpoint", "sharded", updates=2, ranks=2)
    resumed = train("two", ranks=2)
    assert "expert parallel size 2" in resumed.output
    assert len(resumed.stats("train_inner")) == 2
    assert (tmp_path / "two" / "experts").is_dir()
    same_training(tmp_path / "one", tmp_path / "two")


def _monolingual(data, folder):
    """Copy a translation corpus to the file names that the task online_backtranslation expects."""
    for lang in ("de", "en"):
        (folder / lang).mkdir(parents=True)
        for ending in ("bin", "idx"):
            shutil.copy(data / f"train.de-en.{lang}.{ending}", folder / lang / f"train.{ending}")
            shutil.copy(data / f"valid.de-en.{lang}.{ending}", folder)
    shutil.copy(data / "dict.de.txt", folder / "dict.txt")
    return folder


def test_ranks_stay_synchronized_if_a_task_generates_in_a_training_step(mt_data, tmp_path):
    task = (
        "--task", "online_backtranslation", "--mono-langs", "de,en", "--valid-lang-pairs", "de-en",
        "--optimizer", "sgd", "--lr", 0.5, "--max-update", 1, "--no-save", "--max-tokens", 60,
    )  # fmt: skip
    data, logs = _monolingual(mt_data, tmp_path / "data"), []
    for ranks in (1, 2):
        words = mt_args(data, tmp_path, *task, "--update-freq", 2 // ranks)
        run = fairseq("train", *words, ranks=ranks)
        logs.append([*run.stats("train_inner"), *run.stats("valid")])
    names = ("loss", "bt_loss", "dae_loss", "gnorm", "wpb", "valid_loss")
    one, two = ([{k: float(log[k]) for k in names if k in log} for log in run] for run in logs)
    assert len(one) == 2 and one[0]["bt_loss"] > 0
    assert two == [pytest.approx(log, rel=2e-3) for log in one]
