"""Rows in chunks: the same result as in one, whatever the number, with the exchange beside the experts.

Covered: any d, more chunks than rows, unequal rows, ranks without rows; narrow wires and their error; the
order of what is started and awaited, forward and backward; an error in the communication thread is
raised where it is waited for; bytes and messages by formula.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from fairseq_tutel import MoEConfig, MoELayer, make_topology
from fairseq_tutel.comm import asynchronous, pipeline
from fairseq_tutel.comm.how import How
from fairseq_tutel.comm.trip import Trip, chunk_of

CONFIG = MoEConfig(model_dim=6, hidden_dim=8, num_experts=4, activation="gelu")
TOKENS = (9, 0, 7, 2)


def outputs(options, how):
    """Return output and gradients of a layer over all ranks."""
    config = dataclasses.replace(CONFIG, **options)
    layer = MoELayer(config, make_topology([4]), seed=2).double()
    layer.how = how
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(TOKENS[dist.get_rank()], 6, generator=generator, dtype=torch.float64)
    y, output = layer(x.requires_grad_())
    (y.square().sum() + output.balance_loss).backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("exchange", ("ragged", "padded"))
@pytest.mark.parametrize("overlap", (2, 3, 8, 32))
def test_chunks_change_no_number_that_is_not_summed_over_them(ranks, overlap, exchange):
    options = {"exchange": exchange, "capacity_factor": 1.25}
    whole = ranks(4).run(outputs, options, How())
    for got, expected in zip(
        ranks(4).run(outputs, options, How(overlap=overlap)), whole, strict=True
    ):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wire, error", [("bf16", 2**-7), ("fp8", 2**-3)])
@pytest.mark.parametrize("overlap", (1, 2))
def test_narrow_wires_err_by_their_digits(ranks, wire, error, overlap):
    exact = ranks(4).run(outputs, {}, How())
    lossy = ranks(4).run(outputs, {"a2a_dtype": wire}, How(overlap=overlap))
    for got, expected in zip(lossy, exact, strict=True):
        for a, b in zip(got, expected, strict=True):
            largest = b.abs().max() if b.numel() else torch.ones(())
            assert (a - b).abs().max().item() <= 8 * error * largest if b.numel() else True
    y, whole = lossy[0][0], exact[0][0]
    assert not torch.equal(y, whole)


@pytest.mark.parametrize("number", (1, 2, 3, 7))
def test_chunks_of_a_block_differ_by_one_and_sum_to_it(number):
    counts = torch.arange(20)
    parts = torch.stack([chunk_of(counts, i, number) for i in range(number)])
    assert torch.equal(parts.sum(0), counts)
    assert int((parts.amax(0) - parts.amin(0)).max()) <= 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diary(Trip):
    """Moves nothing, and writes down when it is asked to."""

    name: str
    lines: list

    def travel(self, rows, homeward):
        self.lines.append(f"{'back' if homeward else 'there'} {self.name}")
        return rows.clone()


def test_all_chunks_leave_before_the_first_expert_works_and_backward_runs_in_reverse(monkeypatch):
    lines = []
    monkeypatch.setattr(
        asynchronous,
        "start",
        lambda f, rows: lines.append("start") or Later(lambda: f(rows), lines),
    )
    x = torch.randn(4, 2, requires_grad=True)
    trips = [Diary(name=str(i), lines=lines) for i in range(2)]

    def stage(i, rows):
        lines.append(f"experts {i}")
        rows = rows * 2
        rows.register_hook(lambda _: lines.append(f"experts {i} backward"))
        return rows

    y = pipeline.run(x.split(2), trips, stage)
    forward, lines[:] = list(lines), []
    assert forward == [
        "start", "start", "there 0", "experts 0", "start", "there 1", "experts 1", "start", "back 0",
        "back 1",
    ]  # fmt: skip
    y.sum().backward()
    assert lines == [
        "start", "start", "there 1", "experts 1 backward", "start", "there 0", "experts 0 backward",
        "start", "back 1", "back 0",
    ]  # fmt: skip
    assert torch.equal(x.grad, torch.full((4, 2), 2.0))


class Later:
    """Work that is done when it is waited for."""

    def __init__(self, work, lines):
        self.work = work

    def result(self):
        return self.work()


def test_an_error_beside_is_raised_where_it_is_waited_for():
    def fail(rows):
        raise RuntimeError("the peer is gone")

    pending = asynchronous.start(fail, torch.ones(1))
    with pytest.raises(RuntimeError, match="the peer is gone"):
        pending.result()
    assert asynchronous.start(torch.neg, torch.ones(1)).result() == -1  # the thread lives on


def traffic(how, tokens):
    """Count messages and bytes that leave this rank in one forward, by what the collectives are given."""
    place = make_topology([4], ranks_per_node=2)
    layer = MoELayer(dataclasses.replace(CONFIG, top_k=4), place, seed=2)
    layer.how = how
    rank, sent = dist.get_rank(), {"messages": 0, "bytes": 0, "across": 0}
    original = dist.all_to_all_single

    def counting(out, rows, receive=None, send=None, group=None, **kwargs):
        if rows.is_floating_point():
            members = dist.get_process_group_ranks(group)
            for other, n in zip(members, send, strict=True):
                sent["messages"] += other != rank and n > 0
                sent["bytes"] += (other != rank) * n * rows.shape[1] * rows.element_size()
                sent["across"] += other // 2 != rank // 2 and n > 0
        return original(out, rows, receive, send, group=group, **kwargs)

    dist.all_to_all_single = counting
    try:
        layer(torch.randn(tokens, CONFIG.model_dim))
    finally:
        dist.all_to_all_single = original
    return sent


@pytest.mark.parametrize("overlap", (1, 4))
def test_messages_and_bytes_are_those_of_the_formulas(ranks, overlap):
    tokens, world, local, row = 8, 4, 2, 6 * 4
    # Every token goes to all four experts, one on each rank, and back.
    for sent in ranks(4).run(traffic, How(overlap=overlap), tokens):
        assert sent["messages"] == 2 * overlap * (world - 1)
        assert sent["across"] == 2 * overlap * (world - local)
        assert sent["bytes"] == 2 * tokens * (world - 1) * row
    for sent in ranks(4).run(traffic, How(overlap=overlap, algorithm="2dh"), tokens):
        nodes = world // local
        assert sent["messages"] == 2 * overlap * (local - 1 + nodes - 1)
        assert sent["across"] == 2 * overlap * (nodes - 1)
        within, across = (local - 1) * nodes * tokens, (nodes - 1) * local * tokens
        assert sent["bytes"] == 2 * (within + across) * row
