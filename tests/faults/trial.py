"""Trains with one injected fault, and checks exit codes, checkpoints and the resumed run."""

import json
import random
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from cli import start
from models import lm_args

from fairseq_tutel.checkpoint import folders, shards

PLACES = str(Path(__file__).parent / "faulty_places")
# BEGUN is the number of updates in the checkpoint from which a run resumes.
UPDATES, SAVE_EVERY, BEGUN, EXPERTS = 8, 2, 4, 4
TIMEOUT, SECONDS = 4, 180  # --moe-comm-timeout and the longest time of a run, in seconds
SGD = ("--optimizer", "moe_sgd", "--momentum", 0.9, "--lr", 0.5)
CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # another number of ranks changes the order of sums
SAVED = re.compile(r"Saved checkpoint \S+ \(epoch \d+ @ (\d+) updates|; update (\d+) is saved in")
LAST_LINE = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|error)\b.*$", re.M)
# A regular expression that matches the error messages with which a rank may end.
CLEAR = re.compile(
    r"rank \d+ (could not|ends, because)|ranks? [\d, -]+ did not reach|an injected fault|which is corrupt"
    r"|became NaN or infinite at update \d+|could not be written|no file can be written|files are missing"
    r"|which is corrupt or missing"
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A fault to inject into a training run, and the expected result.

    The fault `what` is kill, stop, error, oom, signal, nan, empty (batch), full (disk), flip (a bit),
    remove or none. At the place "update", `what` is the tensor that becomes NaN: expert, master or
    exp_avg_sq. The fault happens when `rank` reaches `place` of `faulty_places` for the `when`-th time. If
    `everywhere` is set, the fault kills all ranks. `number` is the name of a signal. `outcome` is "ended"
    if the fault must end the run with an error, and otherwise "continued". The log of at least one rank
    must match the pattern `says`. If `begun` is set, the run with the fault resumes from a checkpoint.
    After the fault, a run on `ranks_after` ranks resumes. All runs use `flags`. If `exact` is set, the
    final weights must equal the weights of a run without a fault.
    """

    what: str = "none"
    place: str = "none"
    when: int = 1
    rank: int = 0
    everywhere: bool = False
    number: str = ""
    outcome: str = "ended"
    says: str = ""
    begun: bool = False
    ranks_after: int = 2
    flags: tuple[str, ...] = ()
    exact: bool = True


@dataclass(frozen=True)
class Job:
    """A finished training run: exit codes and logs, whether the fault happened, and whether a rank hung."""

    codes: list[int]
    logs: list[str]
    fired: bool = False
    hung: bool = False

    @property
    def text(self) -> str:
        return "\n".join(self.logs)


def environment(folder: Path, trial: Trial, name: str = "fired") -> dict[str, str]:
    """Return the environment variables that inject a fault once into a run with --save-dir FOLDER/save."""
    paths = {"marker": str(folder / name), "save_dir": str(folder / "save")}
    return {"FAULT": json.dumps({**asdict(trial), **paths})}


def train(data: Path, save_dir: Path, ranks: int, flags: tuple, updates: int, trial=None, extra=()) -> Job:
    """Train until all ranks have ended, or kill the ranks after SECONDS seconds."""
    marker = save_dir.parent / f"fired-{time.monotonic_ns()}"
    words = lm_args(
        data, save_dir, "--user-dir", PLACES, "--moe-comm-timeout", TIMEOUT, "--batch-size", 8,
        "--save-interval-updates", SAVE_EVERY, "--moe-micro-batches", 4, *SGD, *flags, *extra,
        updates=updates,
    )  # fmt: skip
    env = environment(save_dir.parent, trial or Trial(), marker.name)
    started = start("train", *words, ranks=ranks, env=env)
    processes = [process for process, _ in started]
    end, fired, hung = time.monotonic() + SECONDS, False, False
    while alive := [rank for rank, process in enumerate(processes) if process.is_alive()]:
        if not fired and marker.exists():
            fired = True
            for rank, process in enumerate(processes):
                if trial.everywhere and rank != trial.rank:
                    process.kill()
        stopped = [trial.rank] if fired and trial.what == "stop" else []
        hung = time.monotonic() > end
        if hung or alive == stopped:
            for rank in alive:
                processes[rank].kill()
        time.sleep(0.02)
    for process in processes:
        process.join()
    logs = [log.read_text() if log.exists() else "" for _, log in started]
    return Job([process.exitcode for process in processes], logs, fired, hung)


def carry_out(trial: Trial, data: Path, folder: Path, undisturbed: Any) -> None:
    """Train with a fault, and assert that the exit codes and the resumed run are as expected.

    `folder` is empty. `undisturbed(flags, updates)` returns the --save-dir of a run without a fault.
    """
    save_dir = folder / "save"
    if trial.begun:
        shutil.copytree(undisturbed(trial.flags, BEGUN), save_dir)
    torn = tear(trial.what, save_dir) if trial.what in ("flip", "remove") else None
    job = train(data, save_dir, 2, trial.flags, UPDATES, trial)
    assert (job.fired or torn) and not job.hung, job.text[-2000:]
    assert re.search(trial.says, job.text), job.text[-2000:]
    check_end(trial, job)
    check_checkpoints(save_dir, job, torn)
    ranks = 2
    if trial.outcome != "continued":
        ranks, extra = trial.ranks_after, ()
        if torn:  # the error message advises --restore-file
            torn.unlink(missing_ok=True)
            extra = ("--restore-file", str(newest(p for p in whole(save_dir) if "last" not in p.name)))
        again = train(data, save_dir, ranks, trial.flags, UPDATES, extra=extra)
        assert not any(again.codes) and not again.hung, again.text[-2000:]
        check_checkpoints(save_dir, again, torn)
    assert updates_of(save_dir / "checkpoint_last.pt") == UPDATES
    if trial.exact:
        expected = weights(undisturbed(trial.flags, UPDATES) / "checkpoint_last.pt")
        found = weights(save_dir / "checkpoint_last.pt")
        for name in expected.keys() & found.keys():
            if ranks == 2:
                assert torch.equal(expected[name], found[name]), name
            else:
                torch.testing.assert_close(expected[name], found[name], **CLOSE)


def check_end(trial: Trial, job: Job) -> None:
    """Assert that exit codes are as expected, and that the error of each surviving rank matches `CLEAR`."""
    if trial.outcome == "continued":
        assert not any(job.codes), job.text[-2000:]
        return
    struck = {0, 1} if trial.everywhere else {trial.rank} if trial.what in ("kill", "stop") else set()
    for rank, (code, log) in enumerate(zip(job.codes, job.logs, strict=True)):
        if rank not in struck:
            assert code > 0 and CLEAR.search((LAST_LINE.findall(log) or [log])[-1]), log[-2000:]


def check_checkpoints(save_dir: Path, job: Job, torn: Path | None) -> None:
    """Assert that every checkpoint opens, and that the newest checkpoint has the last saved update."""
    files = [path for path in checkpoints(save_dir) if torn is None or not belongs(torn, path)]
    for path in files:
        assert problem_of(path) is None
    saved = [int(a or b) for a, b in SAVED.findall(job.logs[0])]
    if saved:
        assert updates_of(newest(files)) >= max(saved)


def checkpoints(save_dir: Path) -> list[Path]:
    """Return the checkpoint files in --save-dir, except crash.pt."""
    return sorted(path for path in save_dir.glob("*.pt") if path.name != "crash.pt")


def whole(save_dir: Path) -> list[Path]:
    return [path for path in checkpoints(save_dir) if problem_of(path) is None]


def newest(paths: Any) -> Path:
    return max(paths, key=updates_of)


def updates_of(path: Path) -> int:
    return torch.load(path, weights_only=False)["optimizer_history"][-1]["num_updates"]


def problem_of(path: Path) -> str | None:
    """Return why a checkpoint is bad, or None if the checkpoint opens, is finite and has every expert."""
    try:
        tensors = weights(path)
    except Exception as error:
        return f"{path.name} does not open: {error}"
    experts = [t for name, t in tensors.items() if re.search(r"\.experts\.fc\d_(?:weight|bias)$", name)]
    complete = experts and all(len(tensor) == EXPERTS for tensor in experts)
    finite = all(torch.isfinite(tensor).all() for tensor in tensors.values())
    return None if complete and finite else f"{path.name} lacks experts or is not finite"


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Return all model and optimizer tensors of a checkpoint by name, including experts in shard files."""
    content = torch.load(path, weights_only=False)
    for part in (content["model"], content.get("last_optimizer_state", {})):
        shards.bind(part, path)
        shards.unbind(part)
    tensors = dict(content["model"])
    for index, state in content.get("last_optimizer_state", {}).get("state", {}).items():
        tensors |= {f"{index}.{key}": value for key, value in state.items() if torch.is_tensor(value)}
    return tensors


def belongs(path: Path, checkpoint: Path) -> bool:
    """Return whether `path` is the checkpoint itself or one of its shard files."""
    return path == checkpoint or path.parent.name in folders.mentions(checkpoint)


def tear(how: str, save_dir: Path) -> Path:
    """Flip a bit of checkpoint_last.pt, or remove checkpoint_last.pt; return the path."""
    path = save_dir / "checkpoint_last.pt"
    content = bytearray(path.read_bytes())
    path.unlink()
    if how == "flip":
        content[random.Random(1).randrange(len(content) // 4, len(content) // 2)] ^= 1
        path.write_bytes(content)
    return path
