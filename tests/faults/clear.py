"""Whether the ranks of a job that ended say what happened, in one sentence each."""

import re
import signal

from fairseq_tutel.parallel.signals import EXIT_CODE

from .job import Job
from .plan import Fault

LAST_LINE = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Exit|Interrupt)|error)(?:: (.*))?$")
# What a user can act on. All other errors are torch's, or Python's, own.
CLEAR = (
    r"error: rank \d+ (could not|ends, because) ",
    r"error: ranks? [\d, -]+ did not reach ",
    r"an injected fault",
    r"rror: rank \d+ ran out of memory in ",
    r"rror: the loss or a gradient became NaN or infinite at update \d+",
    r"rror: .* which is corrupt",
    r"rror: (\[Errno \d+\] )?\S+ could not be written: ",
    r"error: --save-dir is \S+, in which no file can be written",
    r"\S+ keeps its experts in \S+, where \d+ files are missing",
    r"the checkpoint keeps experts in \S+, which is corrupt or missing",
)
MISSING = re.compile(r"\branks? ([\d, -]+) (?:did not (?:answer|reach)|ended without|failed: )")
# The line that says how a signal has ended a training.
PREEMPTED = re.compile(r"a rank received a signal; (?:update (\d+) is saved in|there is nothing to save)")


def last_error(log: str) -> str:
    """Return the line in which the last error of a log stands, or "" without one."""
    found = [line for line in log.splitlines() if LAST_LINE.match(line)]
    return found[-1] if found else ""


def unclear(job: Job, fault: Fault) -> list[str]:
    """Return what is wrong with how a job ended: nothing where it is right, or was told clearly."""
    if fault.what == "signal":
        return unclear_after_signal(job, fault)
    problems = [f"rank {rank} hung" for rank in job.hung]
    everyone = range(len(job.exit_codes)) if fault.target == "all" else [fault.rank]
    struck = set(everyone) if job.fired and fault.what in ("kill", "stop") else set()
    told = []
    for rank, code in enumerate(job.exit_codes):
        if code == 0 or rank in struck or rank in job.hung:
            continue
        line = last_error(job.logs[rank])
        told.append(line)
        if code < 0:
            problems.append(f"rank {rank} was ended by signal {-code}")
        elif not any(re.search(pattern, line) for pattern in CLEAR):
            problems.append(f"rank {rank} ended with: {line or job.logs[rank][-200:]!r}")
    # Ranks that never came are counted alone.
    strangers = any("could not find the other ranks" in line for line in told)
    if told and struck and not strangers and not any(fault.rank in missing(t) for t in told):
        problems.append(f"no rank names rank {fault.rank}: {told}")
    if told and fault.what == "error" and "an injected fault" not in job.logs[fault.rank]:
        problems.append(f"rank {fault.rank} does not say its error: {told}")
    return problems


def unclear_after_signal(job: Job, fault: Fault) -> list[str]:
    """Return what is wrong with how a job ended after a signal.

    It may have been over before, or have had no update, which a signal at start-up ends as it ends any
    program. Otherwise every rank says by its exit code that it has saved; torchrun's is always 1.
    """
    problems = [f"rank {rank} hung" for rank in job.hung]
    text, number = "\n".join(job.logs), signal.Signals[fault.detail]
    is_preempted = any(PREEMPTED.search(log) for log in job.logs)
    by_torchrun = fault.target == "torchrun"
    codes = set(job.exit_codes)
    if not any(codes):
        return problems
    if "will restart worker group" in text:
        problems.append("torchrun started the ranks again")
    if '"num_updates"' in text and not is_preempted and "done training" not in text:
        problems.append(f"trained, and did not save: exit codes {job.exit_codes}, {_errors(job)}")
    if is_preempted and codes != {1 if by_torchrun else EXIT_CODE}:
        problems.append(f"saved, and has exit codes {job.exit_codes}, {_errors(job)}")
    for rank, code in enumerate(job.exit_codes):
        line = last_error(job.logs[rank])
        told = any(re.search(pattern, line) for pattern in CLEAR)
        if code not in (EXIT_CODE, -number, 1 if by_torchrun or told else EXIT_CODE):
            problems.append(f"rank {rank} ended with {code}: {line or job.logs[rank][-200:]!r}")
    return problems


def _errors(job: Job) -> list[str]:
    return [last_error(log) for log in job.logs]


def missing(line: str) -> set[int]:
    """Return the ranks that a sentence says are missing; rank 0 keeps the store."""
    found = {0} if "rank 0, which runs the rendezvous store" in line else set()
    for names in MISSING.findall(line):
        for part in names.split(","):
            first, _, last = part.strip().partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
