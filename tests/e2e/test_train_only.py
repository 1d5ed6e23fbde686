"""With --moe-train-only, frozen weights keep their bits on two ranks and after a resume."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli import HYDRA, USER_DIR, fairseq, refused
from equality import same_bits
from models import dense_lm_args, mt_args

from fairseq_tutel.checkpoint.shards import bind, unbind

# For each value of --moe-train-only: text in the names of all trained parameters, and other flags.
CASES = {
    "gates": (".fc1.gate.", ("--bf16", "--moe-zero-stage", 1, "--checkpoint-activations")),
    "experts": (".experts.", ("--moe-checkpoint", "sharded", "--moe-zero-stage", 2, "--moe-balance-bias")),
    "expert:0,3": (".experts.", ("--bf16", "--weight-decay", 0)),
    "decoder": ("decoder.", ()),
}


def _weights(folder):
    path = folder / "checkpoint_last.pt"
    state = torch.load(path, weights_only=False)
    bind(state, Path(path))
    unbind(state)
    return state["model"]


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.long] * (what != "gates")) for what in CASES]
)
def test_only_the_named_parameters_change_on_two_ranks_and_after_a_resume(what, mt_data, tmp_path):
    part, flags = CASES[what]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"

    def train(folder, updates):
        args = ("--moe-train-only", what, *flags)
        return fairseq("train", *mt_args(mt_data, folder, *args, updates=updates), ranks=2)

    assert f"--moe-train-only {what}: this rank trains" in train(resumed, 2).output
    before = _weights(resumed)
    train(resumed, 4)
    train(straight, 4)
    after = _weights(straight)
    same_bits(after, _weights(resumed))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    # With --share-all-embeddings, the encoder and the decoder have the same embeddings.
    assert all(part in name or "embed_tokens" in name for name in changed)
    if ":" in what:
        for name in changed:
            kept = [torch.equal(one, two) for one, two in zip(before[name], after[name], strict=True)]
            assert kept[1] and kept[2] and not (kept[0] and kept[3])


@pytest.mark.long
def test_a_dense_run_trains_only_embeddings_and_cannot_resume_with_all_parameters(lm_data, tmp_path):
    embeddings = ("--moe-train-only", "embeddings")
    fairseq("train", *dense_lm_args(lm_data, tmp_path, *embeddings, updates=2))
    before = _weights(tmp_path)
    output = refused("train", *dense_lm_args(lm_data, tmp_path, updates=4))
    assert "--moe-train-only is empty" in output and "--reset-optimizer" in output
    fairseq("train", *dense_lm_args(lm_data, tmp_path, *embeddings, updates=4))
    after = _weights(tmp_path)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("embed_tokens" in name or "output_projection" in name for name in changed)


@pytest.mark.parametrize(("what", "code"), [("'expert:0,3'", 0), ("nothing", 1)])
def test_fairseq_hydra_train_reads_moe_train_only_without_a_preloaded_plugin(what, code, lm_data, tmp_path):
    words = (
        "--config-dir", HYDRA, "--config-name", "tiny_lm", f"task.data={lm_data}",
        f"common.user_dir={USER_DIR}",
        f"+task.moe_train_only={what}", "++optimizer.weight_decay=0", "++common.cpu=true",
        "optimization.max_update=1", "++checkpoint.no_save=true", "++dataset.disable_validation=true",
    )  # fmt: skip
    command = [sys.executable, "-m", "fairseq_cli.hydra_train", *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    printed = done.stdout + done.stderr
    assert done.returncode == code, printed
    assert (
        "--moe-train-only expert:0,3: this rank trains" if code == 0 else "names no parameter"
    ) in printed
