"""Every fairseq command around an MoE model, through its real command line."""

import os
import re
import zipfile

import forkserver
import pytest
import torch
from cli import HYDRA, ROOT, USER_DIR, _child, fairseq, refused, start, tail, torchrun_environment, wait
from fairseq import checkpoint_utils
from models import lm_args, mt_args
from ports import free_port
from torch.distributed import run as torchrun
from torch.distributed.launcher.api import elastic_launch

from fairseq_tutel.plugin import register

PACKAGE = str(ROOT / "fairseq_tutel")
ALL = ("--required-batch-size-multiple", 1)  # every sentence, also those of a last, smaller batch
EXPERT_METRICS = {
    "moe_gate_loss", "moe_gshard_loss", "entropy_gating", "expert1_balance_top",
    "expert1_balance_bottom", "unused_expert1_count", "overflow_expert1", "expert2_balance_top",
    "expert2_balance_bottom", "unused_expert2_count", "overflow_expert2",
}  # fmt: skip


@pytest.fixture(scope="module")
def lm(lm_data, tmp_path_factory):
    """A language model that two ranks trained, and its training run."""
    folder = tmp_path_factory.mktemp("lm-run")
    extra = ("--record-a2a-perf-stats", "--lr", 0.02)
    return folder, fairseq("train", *lm_args(lm_data, folder, *extra, updates=40), ranks=2)


@pytest.fixture(scope="module")
def mt(mt_data, tmp_path_factory):
    """A translation model that two ranks trained with --eval-bleu, and its training run."""
    folder = tmp_path_factory.mktemp("mt-run")
    bleu = ("--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 12}')
    return folder, fairseq("train", *mt_args(mt_data, folder, *bleu, updates=8), ranks=2)


def test_training_logs_loss_and_expert_metrics_and_learns(lm):
    _, run = lm
    first, *_, last = run.stats("train_inner")
    assert first.keys() >= EXPERT_METRICS | {"loss", "nll_loss", "ppl", "gnorm", "clip"}
    assert float(last["ppl"]) < 0.6 * float(first["ppl"])
    # 4 experts, top-2: entropy below ln 4, a fifth of the experts is one of them.
    assert 0 < float(first["entropy_gating"]) <= 1.387
    assert 25 <= float(first["expert1_balance_top"]) <= 100
    assert float(first["expert1_balance_bottom"]) <= 25
    assert float(last["overflow_expert1"]) == 0
    assert float(last["all_to_all_cpu_time_ms"]) > 0
    (valid,) = run.stats("valid")[-1:]
    assert float(valid["valid_ppl"]) > 1
    assert "expert parallel size 2, replicas 1" in run.output


def test_loss_is_the_cross_entropy_plus_the_weighted_balance_loss(lm):
    bits = 1.442695
    for record in lm[1].stats("train_inner"):
        gate = 0.01 * float(record["moe_gate_loss"]) * bits
        assert float(record["loss"]) == pytest.approx(float(record["nll_loss"]) + gate, abs=2e-3)


def test_eval_lm_gives_the_validation_perplexity(lm, lm_data):
    folder, run = lm
    found = fairseq(
        "eval-lm", lm_data, "--user-dir", USER_DIR, "--path", folder / "checkpoint_last.pt",
        "--gen-subset", "valid", "--tokens-per-sample", 16, "--batch-size", 8, *ALL,
    )  # fmt: skip
    perplexity = float(re.search(r"Perplexity: ([\d.]+)", found.output)[1])
    assert perplexity == pytest.approx(float(run.stats("valid")[-1]["valid_ppl"]), rel=0.01)


def test_a_damaged_checkpoint_is_evaluated_by_the_user_s_word_alone(lm, lm_data, tmp_path):
    content = bytearray((lm[0] / "checkpoint_best.pt").read_bytes())
    with zipfile.ZipFile(lm[0] / "checkpoint_best.pt") as archive:
        tensors = [entry for entry in archive.infolist() if "/data/" in entry.filename]
        record = max(tensors, key=lambda entry: entry.file_size)
        content[content.index(archive.read(record))] ^= 1  # a bit of the largest tensor
    (tmp_path / "damaged.pt").write_bytes(content)
    words = (lm_data, "--user-dir", USER_DIR, "--path", tmp_path / "damaged.pt", "--gen-subset", "valid")
    assert "damaged.pt is not a checkpoint, or one that is corrupt (truncated" in refused("eval-lm", *words)
    assert "Perplexity" in fairseq("eval-lm", *words, env={"FAIRSEQ_TUTEL_OPEN_DAMAGED": "1"}).output


def test_validate_gives_the_training_s_validation_loss(lm, lm_data):
    folder, run = lm
    found = fairseq(
        "validate", lm_data, "--user-dir", USER_DIR, "--task", "moe_language_modeling",
        "--path", folder / "checkpoint_last.pt", "--batch-size", 4, "--log-format", "json",
        *ALL,
    )  # fmt: skip
    expected = float(run.stats("valid")[-1]["valid_loss"])
    assert float(found.stats("valid")[-1]["valid_loss"]) == pytest.approx(expected, abs=0.02)


def test_interactive_continues_a_line(lm, lm_data, tmp_path):
    (tmp_path / "in.txt").write_text("w1 w3 w9\nw2\n")
    found = fairseq(
        "interactive", lm_data, "--user-dir", USER_DIR, "--task", "language_modeling",
        "--path", lm[0] / "checkpoint_last.pt", "--input", tmp_path / "in.txt", "--max-len-b", 8,
        "--beam", 2,
    )  # fmt: skip
    lines = re.findall(r"^H-\d+\t\S+\t(.*)$", found.output, re.M)
    assert len(lines) == 2
    assert lines[0].startswith("w1 w3 w9 ")


def test_generate_continues_lines(lm, lm_data):
    found = fairseq(
        "generate", lm_data, "--user-dir", USER_DIR, "--task", "moe_language_modeling",
        "--path", lm[0] / "checkpoint_last.pt", "--sample-break-mode", "eos", "--batch-size", 4,
        "--skip-invalid-size-inputs-valid-test", "--max-len-b", 6, "--beam", 2, *ALL,
    )  # fmt: skip
    assert len(re.findall(r"^H-\d+", found.output, re.M)) >= 5


def test_bleu_is_computed_during_a_training_on_two_ranks(mt):
    record = mt[1].stats("valid")[-1]
    assert "valid_bleu" in record
    assert float(record["valid_nll_loss"]) > 0


def test_generate_and_interactive_translate_alike(mt, mt_data, tmp_path):
    path = ("--path", mt[0] / "checkpoint_last.pt", "--beam", 2, "--max-len-b", 8)
    whole = fairseq(
        "generate", mt_data, "--user-dir", USER_DIR, "--task", "moe_translation", *path,
        "--batch-size", 7, *ALL,
    )  # fmt: skip
    assert "BLEU4" in whole.output
    sources = dict(re.findall(r"^S-(\d+)\t(.*)$", whole.output, re.M))
    expected = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", whole.output, re.M))
    assert len(sources) == 21
    keys = sorted(sources, key=int)[:3]
    (tmp_path / "in.txt").write_text("\n".join(sources[k] for k in keys) + "\n")
    one = fairseq(
        "interactive", mt_data, "--user-dir", USER_DIR, *path, "--input", tmp_path / "in.txt",
    )  # fmt: skip
    # One sentence at a time or seven in a batch: no token is dropped, so the outputs agree.
    found = re.findall(r"^H-\d+\t\S+\t(.*)$", one.output, re.M)
    assert found == [expected[k] for k in keys]


def test_generate_on_two_ranks_keeps_all_experts_on_each(mt, mt_data):
    run = fairseq(
        "generate", mt_data, "--user-dir", USER_DIR, "--path", mt[0] / "checkpoint_last.pt",
        "--beam", 2, "--max-len-b", 8, "--batch-size", 5, *ALL, ranks=2,
    )  # fmt: skip
    found = set(re.findall(r"^H-(\d+)", run.output, re.M))
    assert found == {str(i) for i in range(21)}


def test_hydra_trains_the_committed_configuration(lm_data, tmp_path):
    run = fairseq(
        "hydra-train", "--config-dir", HYDRA, "--config-name", "tiny_lm", f"task.data={lm_data}",
        f"checkpoint.save_dir={tmp_path}", "optimization.max_update=3", "dataset.num_workers=0",
        "common.log_interval=1", "dataset.required_batch_size_multiple=1", "model.decoder_layers=2",
        "model._name=moe_transformer_lm_gpt", env={"PWD": str(ROOT)},
    )  # fmt: skip
    assert "done training" in run.output
    assert "expert1_balance_top" in run.output
    assert "does not set model sizes from the architecture" in run.output
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    assert any("fc1.experts.fc1_weight" in key for key in saved["model"])
    found = fairseq(
        "eval-lm", lm_data, "--user-dir", USER_DIR, "--path", tmp_path / "checkpoint_last.pt",
        "--tokens-per-sample", 64, "--batch-size", 8, *ALL,
    )  # fmt: skip
    assert "Perplexity" in found.output


def test_stock_task_criterion_and_optimizer_run_and_say_what_they_lack(lm_data, tmp_path):
    stock = ("--task", "language_modeling", "--criterion", "cross_entropy", "--optimizer", "adam")
    args = lm_args(lm_data, tmp_path, *stock, updates=3)
    run = fairseq("train", *args, ranks=2)
    assert run.output.count("trains the experts without a balance loss") == 1
    assert run.output.count("replaced the optimizer adam by moe_adam") == 1
    assert "expert parallel size 2" in run.output
    assert "moe_gate_loss" not in run.output


def _launch(folder, words):
    """Run fairseq-train on two ranks by torchrun's agent, whose workers are forks that import nothing."""
    config, *_ = torchrun.config_from_args(torchrun.parse_args(words))
    elastic_launch(config, _worker)(folder)


def _worker(folder):
    argv = (folder / "words").read_text().split("\n")
    _child("train", argv, {}, str(folder / f"{os.environ['RANK']}.log"), None)


def test_torchrun_s_agent_runs_fairseq_train(lm_data, tmp_path):
    argv = ["fairseq-train", *lm_args(lm_data, tmp_path / "save", updates=2)]
    (tmp_path / "words").write_text("\n".join(map(str, argv)))
    words = ["--nproc-per-node=2", f"--master-port={free_port()}", "--start-method=fork", "fairseq-train"]
    process = forkserver.context().Process(target=_launch, args=(tmp_path, words))
    process.start()
    process.join(100)
    outputs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    assert process.exitcode == 0, tail(outputs[0])
    assert "expert parallel size 2" in outputs[0] and "Saving checkpoint" not in outputs[1]
    assert (tmp_path / "save" / "checkpoint_last.pt").exists()


def test_the_module_without_torchrun_is_fairseq_train(lm_data, tmp_path):
    words = lm_args(lm_data, tmp_path, updates=1)
    at = words.index("--user-dir")  # which the module does not need
    run = fairseq("tutel-train", *words[:at], *words[at + 2 :])
    assert "experts: 2 MoE layers" in run.output
    assert (tmp_path / "checkpoint_last.pt").exists()


def test_fairseq_s_own_launch_flags_work_on_cpu(lm_data, tmp_path):
    port = free_port()
    started = []
    for rank in range(2):
        started += start(
            "train", *lm_args(lm_data, tmp_path, updates=2), "--distributed-world-size", 2,
            "--distributed-rank", rank, "--distributed-init-method", f"tcp://127.0.0.1:{port}",
            "--distributed-no-spawn", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp",
        )  # fmt: skip
    run = wait(started)
    assert run.ok, tail(run.output)
    assert "expert parallel size 2" in run.output


def test_the_package_itself_is_a_user_dir(lm_data, tmp_path):
    run = fairseq("train", *lm_args(lm_data, tmp_path, "--user-dir", PACKAGE, updates=1))
    assert "experts: 2 MoE layers" in run.output


def test_a_dense_baseline_is_resumed_and_generated_from(mt_data, tmp_path):
    dense = (
        "--task", "translation", "--arch", "transformer_iwslt_de_en",
        "--criterion", "label_smoothed_cross_entropy", "--optimizer", "adam",
    )  # fmt: skip
    words = mt_args(mt_data, tmp_path, *dense, updates=2)
    for flag in ("--moe-freq", "--moe-expert-count"):
        at = words.index(flag)
        del words[at : at + 2]
    fairseq("train", *words)
    words[words.index("--max-update") + 1] = 4
    run = fairseq("train", *words)
    assert "Loaded checkpoint" in run.output
    assert "experts:" not in run.output
    found = fairseq(
        "generate", mt_data, "--user-dir", USER_DIR, "--path", tmp_path / "checkpoint_last.pt",
        "--beam", 1, "--max-len-b", 5, "--batch-size", 8,
    )  # fmt: skip
    assert "BLEU4" in found.output


def test_the_environment_of_torchrun_never_starts_unrelated_trainings(lm_data, tmp_path):
    """Stock would read world size 1 from its flags and let every worker write the same folder."""
    args = lm_args(lm_data, tmp_path, "--distributed-world-size", 1, updates=1)
    env = torchrun_environment(0, 1, free_port())
    assert fairseq("train", *args, env=env).ok
    run = fairseq(
        "train", *lm_args(lm_data, tmp_path / "two", "--distributed-world-size", 1, updates=1), ranks=2
    )
    assert "expert parallel size 2" in run.logs[0]
    assert "Saving checkpoint" not in run.logs[1]


def test_python_opens_a_training_s_checkpoint_for_inference(lm, tmp_path):
    """What a hub user does: no command line, and a saved configuration of two ranks and a GPU."""
    register()
    state = torch.load(lm[0] / "checkpoint_last.pt", weights_only=False)
    state["cfg"]["common"]["fp16"] = True
    state["cfg"]["distributed_training"]["ddp_backend"] = "pytorch_ddp"
    torch.save(state, tmp_path / "gpu.pt")
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "gpu.pt")])
    assert models[0].decoder.layers[0].fc1.experts.fc1_weight.shape[0] == 4
