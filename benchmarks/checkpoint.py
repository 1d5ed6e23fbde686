"""Measure the host memory for saving and loading many experts, and compare it with a formula.

The checkpoints are full or sharded. The ranks use gloo and hold L layers of E experts; each weight has
--moments optimizer tensors. Each save and each load runs in new processes. The result is the largest growth
of a rank's memory, sampled every millisecond. Pages mapped from files do not count.

    python -m benchmarks.checkpoint --ranks 4 --layers 12 --experts 64 --expert-mb 4 --json out.json
"""

import argparse
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import command
from benchmarks.machine import facts
from benchmarks.memory import own_memory, own_peak
from benchmarks.output import BadOption, Report
from fairseq_tutel import MoEConfig, MoELayer, make_topology
from fairseq_tutel.checkpoint.experts import (
    CopiedExperts,
    begin_folder,
    commit_folder,
    gather_experts,
    gather_to_first,
    save_as_records,
    save_in_shards,
)
from fairseq_tutel.checkpoint.shards import ShardedTensor, bind
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.world import Work

MODEL_DIM = 512
BYTES = 4  # float32
States = dict[str, list[Tensor]]
# A background save writes the same files as a sharded save. Only the seconds without training are counted.
FORMS = {"full": ("save", "load"), "sharded": ("save", "load"), "background": ("save",)}


def main(words: list[str] | None = None) -> int:
    """Run the requested measurements."""
    parser = command.parser_of("checkpoint", "Measure memory and time of saving and loading experts.")
    for flag, default, text in (
        ("--ranks", 4, "processes, which share the experts"),
        ("--layers", 12, "MoE layers"),
        ("--experts", 64, "experts of a layer"),
        ("--expert-mb", 4, "weights of an expert, in MiB of float32"),
        ("--moments", 2, "tensors of optimizer state for each weight"),
    ):
        parser.add_argument(flag, type=int, default=default, help=text)
    parser.add_argument("--folder", type=Path, help="for the checkpoints; else a temporary one")
    return command.run(parser, words, _measure_all)


def _measure_all(options: argparse.Namespace) -> int:
    if options.quick:
        options.ranks, options.layers, options.experts, options.expert_mb = 2, 1, 2, 1
    if options.ranks < 1 or options.experts % options.ranks:
        raise BadOption(f"--ranks is {options.ranks}; give a divisor of --experts ({options.experts}).")
    machine = facts(torch.device("cpu"), torch.float32)
    report = Report("checkpoint", "", machine, command.shown(options) | {"folder": None}, options.json)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
    try:
        for form, modes in FORMS.items():
            rows = [row for mode in modes for row in _measure(options, form, mode, folder)]
            report.add(_name(options), {}, rows)
            shutil.rmtree(folder)
            folder.mkdir()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.finish()
    return 0


def _name(arguments: argparse.Namespace) -> str:
    return (
        f"{arguments.layers} layers x {arguments.experts} experts x {arguments.expert_mb} MiB, "
        f"{arguments.moments} moments, {arguments.ranks} ranks"
    )


def _measure(arguments: argparse.Namespace, form: str, mode: str, folder: Path) -> list[dict[str, Any]]:
    """Run one save or load; return a row for rank 0, and a row with the maximum over the other ranks."""
    context = multiprocessing.get_context("spawn")
    answers, meeting = context.Queue(), f"file://{tempfile.mktemp(prefix='meeting-')}"
    processes = [
        context.Process(target=_rank, args=(rank, arguments, form, mode, folder, meeting, answers))
        for rank in range(arguments.ranks)
    ]
    for process in processes:
        process.start()
    grown = dict(answers.get(timeout=1800) for _ in processes)
    for process in processes:
        process.join()
    others = [grown[rank] for rank in range(1, arguments.ranks)]
    kinds = [("rank 0", grown[0], True)]
    if others:
        kinds.append(("other ranks", max(others, key=lambda each: each["peak_bytes"]), False))
    return [
        {
            "variant": f"{form}, {who}",
            "mode": mode,
            "status": "ok",
            "formula_bytes": formula(arguments, form, mode, first),
            **numbers,
        }
        for who, numbers, first in kinds
    ]


def formula(arguments: argparse.Namespace, form: str, mode: str, first: bool) -> int:
    """Return the bytes that a rank needs in addition to its own experts and moments.

    full: rank 0 keeps all experts and moments until they are written; gloo keeps a copy of the stack that
    arrives; every rank reads the whole file.
    sharded: a save needs no memory, and a load needs memory for the local experts of one layer.
    background: copies of the rank's own experts and moments.
    """
    expert = arguments.expert_mb * 2**20
    everything = arguments.layers * arguments.experts * expert * (1 + arguments.moments)
    stack = arguments.experts * expert // 2  # the weight of fc1 or of fc2
    if form == "full":
        if mode == "load":
            return everything
        return everything + stack if first else 0
    if form == "background":
        return everything // arguments.ranks
    return arguments.experts * expert // arguments.ranks if mode == "load" else 0


def _rank(
    rank: int, arguments: argparse.Namespace, form: str, mode: str, folder: Path, meeting: str, answers: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=arguments.ranks)
    place = make_topology([arguments.experts])
    hidden = arguments.expert_mb * 2**20 // BYTES // MODEL_DIM // 2
    config = MoEConfig(MODEL_DIM, hidden, arguments.experts, expert_bias=False)
    model = nn.Sequential(*(MoELayer(config, place, seed=1, name=str(i)) for i in range(arguments.layers)))
    moments: States = {
        name: [torch.full_like(p, k + 1) for k in range(arguments.moments)]
        for name, p in model.named_parameters()
        if ".experts." in name
    }
    action: Callable[[], float | None] = {
        ("full", "save"): lambda: _save_full(model, moments, place, folder),
        ("sharded", "save"): lambda: _save_sharded(model, moments, place, folder),
        ("background", "save"): lambda: _save_in_background(model, moments, place, folder),
        ("full", "load"): lambda: _load(model, moments, place, folder),
        ("sharded", "load"): lambda: _load(model, moments, place, folder),
    }[form, mode]
    dist.barrier()
    answers.put((rank, _grown_by(action)))
    dist.barrier()
    dist.destroy_process_group()


def _save_full(model: nn.Module, moments: States, place: Topology, folder: Path) -> None:
    gather_experts(model, place)
    state = {name: [gather_to_first(m, place) for m in each] for name, each in moments.items()}
    if place.rank == 0:
        torch.save({"model": model.state_dict(), "state": state}, folder / "checkpoint.pt")


def _save_sharded(model: nn.Module, moments: States, place: Topology, folder: Path) -> None:
    records = save_in_shards(model, place, _states_of(model, moments), folder)
    _save_records(model, moments, place, folder, records)


def _save_in_background(model: nn.Module, moments: States, place: Topology, folder: Path) -> float:
    """Save with a thread; return the seconds in which training would have to wait."""
    begin = time.perf_counter()
    shards = begin_folder(folder)
    copies = CopiedExperts(model, place, _states_of(model, moments))
    work = Work(lambda: copies.write(shards, lambda: None))
    copied = time.perf_counter() - begin
    while not work.look()[0]:
        pass
    dist.barrier()
    begin = time.perf_counter()
    records = commit_folder(shards, work.result)
    save_as_records(model, records)
    seconds = copied + time.perf_counter() - begin
    _save_records(model, moments, place, folder, records)
    return seconds


def _states_of(model: nn.Module, moments: States) -> Callable[[nn.Parameter], dict[str, Tensor]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def states(parameter: nn.Parameter) -> dict[str, Tensor]:
        return {str(k): m for k, m in enumerate(moments[names[id(parameter)]])}

    return states


def _save_records(
    model: nn.Module, moments: States, place: Topology, folder: Path, records: dict[tuple[str, str], Any]
) -> None:
    state = {
        name: [records[name.rpartition(".")[0], f"{name.rpartition('.')[2]}.{k}"] for k in range(len(each))]
        for name, each in moments.items()
    }
    if place.rank == 0:
        torch.save({"model": model.state_dict(), "state": state}, folder / "checkpoint.pt")


def _load(model: nn.Module, moments: States, place: Topology, folder: Path) -> None:
    path = folder / "checkpoint.pt"
    with path.open("rb") as file:  # fairseq loads checkpoints in this way too
        state = torch.load(file, weights_only=True)
    bind(state, path)
    model.load_state_dict(state.pop("model"))
    for name, each in moments.items():
        for own, saved in zip(each, state["state"].pop(name), strict=True):
            part = place.part(len(own) * place.expert_parallel_size)
            if isinstance(saved, ShardedTensor):
                own.copy_(saved.read(part.first, part.num_local))
            else:
                own.copy_(saved[part.first : part.first + part.num_local])


def _grown_by(action: Callable[[], float | None]) -> dict[str, Any]:
    """Run an action; return its seconds and the largest growth of this process's private memory in bytes.

    If the action returns a number of seconds, this number is returned instead of the measured time.
    """
    before, begin = own_memory(), time.perf_counter()
    with own_peak() as peak:
        reported = action()
    seconds = time.perf_counter() - begin if reported is None else reported
    return {"seconds": seconds, "peak_bytes": peak[0] - before}


if __name__ == "__main__":
    sys.exit(main())
