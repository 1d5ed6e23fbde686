"""One trial from its plan to its result: the training that is hit, what it left, and how it goes on.

W ranks.
"""

import contextlib
import re
import shutil
import threading
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from . import disk, files
from .clear import PREEMPTED, last_error, unclear
from .job import Job, train
from .plan import BEGUN, UPDATES, Fault, Trial

SAVED = re.compile(r"Saved checkpoint \S+ \(epoch \d+ @ (\d+) updates")
FROM_ANOTHER = "training resumes from"
# Numbers of the same micro-batches on other ranks differ by rounding.
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@dataclass(frozen=True)
class Result:
    """What came of a trial.

    Attributes:
        trial: its plan.
        outcome: "ended" with a clear error, "preempted" by a signal, or "went on" to the end.
        fired: the fault happened: not every place is reached as often as the plan says.
        seconds: from the fault to the end of the training that was hit.
        resumed: another training went on from what was left, to the end.
        compared: the weights at the end are those of an undisturbed training.
        problems: what must not be, such as a rank that hung; none in a good trial.
        logs: what all ranks of all trainings printed.
    """

    trial: Trial
    outcome: str
    fired: bool
    seconds: float
    resumed: bool = False
    compared: bool = False
    problems: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)


class World:
    """What trials share: the data, and undisturbed trainings by their flags and ranks, made once.

    Args:
        data: a binarized corpus.
        folder: for all that trials write.
        timeout: --moe-comm-timeout in seconds.
    """

    def __init__(self, data: Path, folder: Path, timeout: float) -> None:
        self.data, self.folder, self.timeout = data, folder, timeout
        self._locks: dict[tuple, threading.Lock] = defaultdict(threading.Lock)

    def undisturbed(self, flags: tuple[str, ...], ranks: int, updates: int = UPDATES) -> Path:
        """Return the save dir of a training that nothing happened to."""
        key = (flags, ranks, updates)
        with self._locks[key]:
            name = re.sub(r"\W+", "-", f"{'_'.join(flags)}_{ranks}_{updates}")
            save_dir = self.folder / "undisturbed" / name / "save"
            if not (save_dir / "checkpoint_last.pt").exists():
                save_dir.parent.mkdir(parents=True, exist_ok=True)
                job = train(self.data, save_dir, ranks, flags, updates, 60)
                assert not any(job.exit_codes), last_error(job.logs[0]) or job.logs[0][-2000:]
            return save_dir


def run(trial: Trial, world: World) -> Result:
    """Carry out a trial; what goes wrong in it is in its result."""
    folder = world.folder / "trial"
    save_dir = folder / "save"
    shutil.rmtree(folder, ignore_errors=True)
    save_dir.mkdir(parents=True)
    fault, size = trial.fault, 0
    if trial.disk:
        whole = world.undisturbed(trial.flags, trial.ranks) / "checkpoint_last.pt"
        size = int(trial.disk * whole.stat().st_size)
        if not disk.can_mount():
            fault = Fault(what="full", place="write", when=1 + int(trial.disk), fraction=0.5)
    with disk.small(save_dir, size) if size else contextlib.nullcontext():
        try:
            result = _run(replace(trial, fault=fault), world, save_dir)
        except Exception:  # the other trials go on
            problem = f"could not be carried out: {traceback.format_exc()}"
            result = Result(trial, "broken", fired=False, seconds=0.0, problems=[problem])
    shutil.rmtree(folder, ignore_errors=True)
    return replace(result, trial=trial)


def _run(trial: Trial, world: World, save_dir: Path) -> Result:
    if trial.begun:
        begun = world.undisturbed(trial.flags, trial.ranks, BEGUN)
        shutil.copytree(begun, save_dir, dirs_exist_ok=True)
    torn = files.tear(trial.tear, save_dir) if trial.tear else None
    common = trial.flags, UPDATES, world.timeout
    job = train(world.data, save_dir, trial.ranks, *common, fault=trial.fault)
    finished = not any(job.exit_codes)
    result = Result(
        trial,
        outcome="went on" if finished else "preempted" if _preempted(job) else "ended",
        fired=job.fired or bool(torn) or bool(trial.disk),
        seconds=job.seconds,
        problems=unclear(job, trial.fault),
        logs=list(job.logs),
    )
    result.problems.extend(_loss(trial, save_dir, job, torn))
    if finished:
        result.problems.extend(_at_the_end(save_dir, "the training ended with exit code 0, but"))
    else:
        disk.make_room(save_dir) if trial.disk else None
        result = _go_on(result, world, save_dir, torn)
    at_its_end = not result.problems and files.updates_of(save_dir / "checkpoint_last.pt") == UPDATES
    if trial.compared and at_its_end:
        ranks = trial.ranks if finished else trial.ranks_after
        result.problems.extend(_difference(trial, world, save_dir, ranks))
        result = replace(result, compared=True)
    return result


def _go_on(result: Result, world: World, save_dir: Path, torn: Path | None) -> Result:
    """Start the training again on what it left, as a user would after reading its last sentence."""
    trial, extra = result.trial, ()
    if torn is not None:
        refused = " ".join(last_error(log) for log in result.logs)
        if "which is corrupt" not in refused and "files are missing" not in refused:
            result.problems.append(f"{torn.name} was torn, and the training does not say so")
        torn.unlink(missing_ok=True)
        older = files.newest(p for p in _whole(trial, save_dir) if "last" not in p.name)
        if older is None:  # all checkpoints share the file
            return result
        extra = ("--restore-file", str(older))
    job = train(world.data, save_dir, trial.ranks_after, trial.flags, UPDATES, world.timeout, extra=extra)
    if any(job.exit_codes) or job.hung:
        codes, errors = job.exit_codes, [last_error(log) for log in job.logs]
        result.problems.append(f"does not go on: exit codes {codes}, {errors}")
    else:
        result.problems.extend(_at_the_end(save_dir, "after it went on,"))
        for path in files.checkpoints(save_dir):
            if torn is not None and files.belongs(torn, path):
                continue  # what shared the torn file
            if problem := files.problem_of(path, _num_experts(trial)):
                result.problems.append(f"after it went on, {problem}")
    return replace(result, resumed=not any(job.exit_codes), logs=[*result.logs, *job.logs])


def _loss(trial: Trial, save_dir: Path, job: Job, torn: Path | None) -> Iterator[str]:
    """Yield what a training that was hit should have left and did not."""
    whole = _whole(trial, save_dir)
    for path in files.checkpoints(save_dir):
        # Another program's damage is no fault of the training's.
        if path not in whole and not (torn and files.belongs(torn, path)):
            yield f"left {files.problem_of(path, _num_experts(trial))}"
    if trial.tear:
        gone = torn is not None and torn.name == "checkpoint_last.pt" and trial.tear == "remove"
        if gone and FROM_ANOTHER not in "".join(job.logs):
            yield "did not go on from the newest checkpoint, or not with a word"
        return
    saved = [int(n) for n in SAVED.findall(job.logs[0])] + [BEGUN] * trial.begun
    preempted = _preempted(job)
    saved += [int(found[1]) for found in preempted if found[1]]
    newest = files.newest(whole)
    if saved and (newest is None or files.updates_of(newest) < max(saved)):
        yield f"update {max(saved)} was saved, and the newest whole checkpoint is {newest}"


def _preempted(job: Job) -> list[re.Match[str]]:
    return [found for log in job.logs for found in PREEMPTED.finditer(log)]


def _whole(trial: Trial, save_dir: Path) -> list[Path]:
    return [
        path for path in files.checkpoints(save_dir) if files.problem_of(path, _num_experts(trial)) is None
    ]


def _num_experts(trial: Trial) -> int:
    flags = trial.flags
    return int(flags[flags.index("--moe-expert-count") + 1]) if "--moe-expert-count" in flags else 4


def _at_the_end(save_dir: Path, when: str) -> Iterator[str]:
    last = save_dir / "checkpoint_last.pt"
    if not last.exists():
        yield f"{when} there is no checkpoint_last.pt"
    elif (updates := files.updates_of(last)) != UPDATES:
        yield f"{when} checkpoint_last.pt has {updates} of {UPDATES} updates"


def _difference(trial: Trial, world: World, save_dir: Path, ranks: int) -> Iterator[str]:
    """Yield where the weights differ from an undisturbed training's: bit for bit on the same ranks, else by
    more than rounding.
    """
    expected = files.weights(world.undisturbed(trial.flags, trial.ranks) / "checkpoint_last.pt")
    found = files.weights(save_dir / "checkpoint_last.pt")
    exact = ranks == trial.ranks
    if ranks == trial.ranks and expected.keys() != found.keys():
        yield f"other tensors than undisturbed: {sorted(expected.keys() ^ found.keys())}"
    for name in expected.keys() & found.keys():
        a, b = expected[name], found[name]
        same = torch.equal(a, b) if exact else torch.allclose(a, b, **CLOSE)
        if not same:
            yield f"{name} differs from an undisturbed training's by {(a - b).abs().max():.2g}"
            return
