"""The autotuner of kernels: its choice, its budget, and its cache for later processes."""

import json
import logging
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import forkserver
import pytest
import torch
from workers import Workers

from fairseq_tutel.kernels import autotune, tuning_cache
from fairseq_tutel.kernels.autotune import Tuner, bucket
from fairseq_tutel.kernels.tuning_cache import TuningCache

IDENTITY = {"device": "a card", "triton": "1"}


@dataclass(frozen=True)
class Config:
    block: int


BLOCKS = [Config(16), Config(32), Config(64)]


class Bench:
    """A clock on which every measurement takes a second, and the milliseconds that they find."""

    def __init__(self, milliseconds: dict[int, float]):
        self.now, self.milliseconds, self.tried = 0.0, milliseconds, []

    def launch(self, config: Config) -> None:
        self.tried.append(config.block)

    def compile_all(self, launches) -> list[Exception | None]:
        """Take a minute for all; not a trial."""
        errors: list[Exception | None] = []
        tried, self.now = list(self.tried), self.now + 60
        for launch in launches:
            try:
                launch()
                errors.append(None)
            except Exception as error:
                errors.append(error)
        self.tried = tried
        return errors

    def measure(self, run) -> float:
        run()
        self.now += 1.0
        return self.milliseconds[self.tried[-1]]

    def tuner(self, path: Path, seconds: float = 10.0, place: tuple[int, int] = (0, 1)) -> Tuner:
        return Tuner(
            seconds,
            lambda: TuningCache(path, IDENTITY),
            measure=self.measure,
            clock=lambda: self.now,
            allowed=lambda: True,
            compile_all=self.compile_all,
            place=lambda: place,
        )


TIMES = {16: 3.0, 32: 1.0, 64: 2.0}


@pytest.fixture
def path(tmp_path):
    tuning_cache._warn_once.cache_clear()
    return tmp_path / "cache" / "kernels.json"


def test_the_fastest_is_picked_and_settled(path):
    bench = Bench(TIMES)
    tuner = bench.tuner(path)
    for _ in range(2):
        assert tuner.pick("up", (8, torch.bfloat16), lambda: BLOCKS, bench.launch) == Config(32)
    assert bench.tried == [16, 32, 64]
    tuner.pick("up", (16, torch.bfloat16), lambda: BLOCKS, bench.launch)
    tuner.pick("down", (8, torch.bfloat16), lambda: BLOCKS, bench.launch)
    assert len(bench.tried) == 9


def test_sizes_of_one_class_are_measured_once(path):
    bench = Bench(TIMES)
    tuner = bench.tuner(path)
    for rows in (9, 12, 16):
        assert tuner.pick("up", (rows, True, "half"), lambda: BLOCKS, bench.launch) == Config(32)
    assert bench.tried == [16, 32, 64]
    assert list(tuner.cache.entries) == ["up (16, True, 'half')"]


def test_a_later_process_measures_nothing_again(path):
    bench = Bench(TIMES)
    bench.tuner(path).pick("up", (8,), lambda: BLOCKS, bench.launch)
    later = Bench({})
    assert later.tuner(path).pick("up", (8,), lambda: BLOCKS, later.launch) == Config(32)
    assert later.tried == []


def test_when_the_budget_is_spent_the_rest_is_left_for_a_later_process(path):
    bench = Bench(TIMES)
    tuner = bench.tuner(path, seconds=1.5)
    assert tuner.pick("up", (8,), lambda: BLOCKS, bench.launch) == Config(32)
    assert bench.tried == [16, 32]
    assert tuner.pick("up", (9,), lambda: BLOCKS, bench.launch) == Config(16)  # the default, untried
    assert bench.tried == [16, 32]
    later = Bench({64: 0.5})
    assert later.tuner(path).pick("up", (8,), lambda: BLOCKS, later.launch) == Config(64)
    assert later.tried == [64]


@pytest.mark.parametrize(
    "rank, ranks, own", [(0, 2, [16, 32]), (1, 2, [32, 64]), (2, 4, [32]), (3, 4, [64])]
)
def test_ranks_begin_with_different_candidates_and_read_each_other_s_timings(path, rank, ranks, own):
    bench = Bench(TIMES)
    tuner = bench.tuner(path, place=(rank, ranks))
    tuner.cache = tuner.open_cache()  # before the other ranks have written theirs
    others = [block for block in TIMES if block not in own]
    TuningCache(path, IDENTITY).add("up (8,)", {repr(Config(block)): TIMES[block] for block in others})
    assert tuner.pick("up", (8,), lambda: BLOCKS, bench.launch) == Config(32)
    assert bench.tried == own


def test_a_rank_alone_measures_all_candidates(path):
    bench = Bench(TIMES)
    assert bench.tuner(path, place=(1, 2)).pick("up", (8,), lambda: BLOCKS, bench.launch) == Config(32)
    assert bench.tried == [32, 64, 16]


def test_candidates_are_launched_at_the_same_time_and_their_errors_returned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "a stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(streams.append(stream)))
    streams, all_there, error = [], threading.Barrier(3), RuntimeError("PassManager::run failed")

    def fail() -> None:
        all_there.wait(60)
        raise error

    wait = lambda: all_there.wait(60)  # noqa: E731
    assert autotune.launch_all([wait, fail, wait]) == [None, error, None]
    assert streams == ["a stream"] * 3


def test_without_a_process_group_there_is_one_rank():
    assert autotune.rank_and_ranks() == (0, 1)


def test_the_ranks_of_a_host_share_the_candidates(monkeypatch):
    for name, value in (("is_initialized", True), ("get_rank", 13), ("get_world_size", 16)):
        monkeypatch.setattr(autotune.dist, name, lambda value=value: value)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert autotune.rank_and_ranks() == (13, 16)
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert autotune.rank_and_ranks() == (5, 8)


def test_without_a_budget_the_default_is_taken_and_no_file_read(path):
    bench = Bench(TIMES)
    bench.tuner(path).pick("up", (8,), lambda: BLOCKS, bench.launch)
    none = bench.tuner(path, seconds=0)
    assert none.pick("up", (8,), lambda: BLOCKS, bench.launch) == Config(16)
    assert none.cache is None and len(bench.tried) == 3


def test_nothing_is_measured_for_one_candidate_or_where_nothing_may_be(path):
    bench = Bench(TIMES)
    tuner = bench.tuner(path)
    assert tuner.pick("up", (8,), lambda: BLOCKS[:1], bench.launch) == Config(16)
    tuner.allowed = lambda: False
    assert tuner.pick("up", (8,), lambda: BLOCKS, bench.launch) == Config(16)
    assert bench.tried == [] and not path.parent.exists()
    tuner.allowed = lambda: True
    assert tuner.pick("up", (8,), lambda: BLOCKS, bench.launch) == Config(32)


def failing(error: Exception, block: int = 32):
    def launch(config: Config) -> None:
        if config.block == block:
            raise error

    return launch


def test_a_candidate_that_cannot_compile_is_dropped_with_its_reason(path):
    errors = pytest.importorskip("triton.runtime.errors")
    bench = Bench(TIMES)
    bench.measure = lambda run: run() or 1.0
    for kind, error in (
        ("up", errors.OutOfResources(300_000, 232_448, "shared memory")),
        ("down", RuntimeError("PassManager::run failed\nmore of it")),
    ):
        tuner = bench.tuner(path)
        assert tuner.pick(kind, (8,), lambda: BLOCKS[1:], failing(error)) == Config(64)
        assert tuner.pick(f"only {kind}", (8,), lambda: BLOCKS[1:2] * 2, failing(error)) == Config(32)
    kept = TuningCache(path, IDENTITY).entries
    assert "out of resource: shared memory" in kept["up (8,)"]["Config(block=32)"]
    assert kept["down (8,)"]["Config(block=32)"] == "RuntimeError: PassManager::run failed"
    # Nor is it tried again.
    again = bench.tuner(path).pick("up", (8,), lambda: BLOCKS[1:], failing(AssertionError()))
    assert again == Config(64)


@pytest.mark.parametrize("error", [RuntimeError("illegal memory access"), KeyError("x")], ids=str)
def test_other_errors_are_errors(path, error):
    pytest.importorskip("triton")
    bench = Bench(TIMES)
    bench.measure = lambda run: run() or 1.0
    with pytest.raises(type(error)):
        bench.tuner(path).pick("up", (8,), lambda: BLOCKS, failing(error))


@pytest.mark.parametrize(
    "content",
    [
        '{"identity": {"dev',
        "[]",
        '{"identity": {}, "entries": {}}',
        json.dumps({"identity": IDENTITY, "entries": {"up (8,)": ["x"]}}),
        json.dumps({"identity": IDENTITY, "entries": {"up (8,)": {"Config(block=16)": None}}}),
    ],
)
def test_a_torn_or_foreign_file_is_warned_of_once_and_replaced(path, content, caplog):
    path.parent.mkdir()
    path.write_text(content)
    bench = Bench(TIMES)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert bench.tuner(path).pick("up", (8,), lambda: BLOCKS, bench.launch) == Config(32)
    assert len(caplog.records) == 1 and "measured again" in caplog.text and str(path) in caplog.text
    assert bench.tried == [16, 32, 64]
    assert json.loads(path.read_text())["identity"] == IDENTITY


@pytest.mark.parametrize("place", ("a file where the directory should be", "a directory"))
def test_a_cache_that_cannot_be_used_is_warned_of_and_ignored(path, place, caplog):
    if place == "a directory":
        path.mkdir(parents=True)
    else:
        path.parent.write_text("")
    bench = Bench(TIMES)
    with caplog.at_level(logging.WARNING):
        tuner = bench.tuner(path)
        for key in (8, 9):
            assert tuner.pick("up", (key,), lambda: BLOCKS, bench.launch) == Config(32)
    assert "cannot be written" in caplog.text
    assert len(caplog.records) == len({r.getMessage() for r in caplog.records}) <= 2
    assert not list(path.parent.parent.rglob("*.part"))


def test_another_version_or_device_has_timings_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRSEQ_TUTEL_CACHE", str(tmp_path))
    cache = TuningCache.here()
    assert cache.path.parent == tmp_path and cache.identity["source"]
    for part in cache.identity:
        other = {**cache.identity, part: "another"}
        monkeypatch.setattr(tuning_cache, "identity_here", lambda other=other: other)
        assert TuningCache.here().path != cache.path, part


def test_another_version_of_triton_is_another_identity(monkeypatch):
    triton = pytest.importorskip("triton")
    assert tuning_cache.identity_here()["triton"] == triton.__version__
    monkeypatch.setattr(triton, "__version__", "99.0")
    assert tuning_cache.identity_here()["triton"] == "99.0"


def write(index: int) -> None:
    """Remember which of the processes this is."""
    write.index = index


def add_entries(path: Path, number: int) -> None:
    tuning_cache.LOCK_SECONDS = 60  # a busy machine is no reason to give up
    cache = TuningCache(path, IDENTITY)
    for i in range(number):
        cache.add(f"entry {i}", {f"process {write.index}": float(i)})


def test_what_two_processes_write_at_once_is_all_there(path):
    writers = Workers(2, write, context=forkserver.context())
    try:
        writers.run(add_entries, path, 20)
    finally:
        writers.close()
    entries = TuningCache(path, IDENTITY).entries
    both = ("process 0", "process 1")
    assert entries == {f"entry {i}": dict.fromkeys(both, float(i)) for i in range(20)}


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"FAIRSEQ_TUTEL_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/fairseq_tutel"),
        ({"HOME": "/c"}, "/c/.cache/fairseq_tutel"),
    ],
)
def test_where_the_cache_lies(monkeypatch, environment, expected):
    for name in ("FAIRSEQ_TUTEL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tuning_cache.directory() == Path(expected)


@pytest.fixture
def fresh():
    """A process's tuner that nobody used yet, before and after."""
    autotune._tuner.cache_clear()
    yield
    autotune._tuner.cache_clear()


def test_the_budget_is_the_option_s_and_the_environment_s_before_it(fresh, monkeypatch):
    monkeypatch.delenv(autotune.VARIABLE, raising=False)
    assert autotune._tuner().seconds == 3
    autotune.allow(0.5)
    assert autotune._tuner().seconds == 0.5
    monkeypatch.setenv(autotune.VARIABLE, "0")
    autotune.allow(0.5)
    assert autotune._tuner().seconds == 0
    monkeypatch.setenv(autotune.VARIABLE, "")  # as if it were not there
    autotune.allow(0.5)
    assert autotune._tuner().seconds == 0.5


@pytest.mark.parametrize("value", ("soon", "-1", "nan", "inf"))
def test_a_bad_budget_in_the_environment_is_refused_by_a_sentence(fresh, monkeypatch, value):
    monkeypatch.setenv(autotune.VARIABLE, value)
    with pytest.raises(ValueError, match=rf"^FAIRSEQ_TUTEL_TUNE_SECONDS is '{value}'; give .*\.$"):
        autotune.allow(3.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what holds without a GPU")
def test_without_a_gpu_the_default_is_picked(fresh):
    assert autotune.pick("up", (8,), lambda: BLOCKS, failing(AssertionError(), 16)) == Config(16)


def test_buckets_are_powers_of_two():
    sizes = (0, 1, 2, 3, 4, 5, 1000, 1024, 1025)
    assert [bucket(n) for n in sizes] == [1, 1, 2, 4, 4, 8, 1024, 1024, 2048]


@pytest.mark.gpu
def test_on_a_gpu_the_one_that_does_less_is_picked_but_not_in_a_capture(fresh, path):
    x = torch.randn(2048, 2048, device="cuda")

    def launch(config: Config) -> None:
        for _ in range(config.block):
            x @ x

    configs = [Config(64), Config(1)]
    tuner = Tuner(60.0, lambda: TuningCache(path, IDENTITY))
    launch(configs[0])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert tuner.pick("product", (), lambda: configs, launch) == Config(64)
    assert tuner.pick("product", (), lambda: configs, launch) == Config(1)
    kept = TuningCache(path, IDENTITY).entries["product ()"]
    assert kept["Config(block=64)"] > 10 * kept["Config(block=1)"]
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # one captures once
        assert tuner.pick("product", (), lambda: configs, launch) == Config(1)
