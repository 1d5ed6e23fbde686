"""Results do not depend on the number of row chunks, and the all-to-all overlaps with the experts."""

import dataclasses

import mortal
import pytest
import torch
import torch.distributed as dist

from fairseq_tutel import MoEConfig, MoELayer, make_topology
from fairseq_tutel.parallel import background, exchange, guard
from fairseq_tutel.parallel.all_to_all import AllToAll, Counts
from fairseq_tutel.parallel.strategy import Strategy

CONFIG = MoEConfig(model_dim=6, hidden_dim=8, num_experts=4, activation="gelu")
TOKENS = (9, 0, 7, 2)


def outputs(options, strategy):
    """Return the layer's output and gradients on this rank."""
    config = dataclasses.replace(CONFIG, **options)
    layer = MoELayer(config, make_topology([config.num_experts], 4, 2), seed=2).double()
    layer.follow(strategy)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(TOKENS[dist.get_rank()], 6, generator=generator, dtype=torch.float64)
    y, output = layer(x.requires_grad_())
    (y.square().sum() + output.balance_loss).backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.fixture(scope="module")
def kept(ranks):
    """Return a function that computes the outputs of all ranks once per strategy."""
    made = {}

    def of(options, strategy):
        key = str((options, strategy))
        if key not in made:
            made[key] = ranks(4).run(outputs, options, strategy)
        return made[key]

    return of


@pytest.mark.parametrize("overlap, exchange", [(3, "padded"), (32, "ragged")])
def test_row_chunks_change_only_the_order_of_sums_over_rows(ranks, kept, overlap, exchange):
    options = {"exchange": exchange, "capacity_factor": 1.25}
    whole = kept(options, Strategy())
    for got, expected in zip(ranks(4).run(outputs, options, Strategy(overlap=overlap)), whole, strict=True):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Other strategies convert the same rows to the transfer dtype, so the test needs only these two.
WAYS = {
    "plain": ({}, Strategy()),
    "slices, all of it": (
        {"num_experts": 2, "exchange": "padded"},
        Strategy(adaptive_r=2, overlap=2, algorithm="2dh"),
    ),
}


def largest(tensor):
    return float(tensor.abs().max()) if tensor.numel() else 0.0


# `digit` is the largest rounding error of the transfer dtype, relative to the largest element. Gradients
# are transferred twice as often as outputs, so their error may be twice as large.
@pytest.mark.parametrize("wire, digit", [("bf16", 2**-8), ("fp8", 2**-4)])
@pytest.mark.parametrize("way", WAYS)
def test_the_precision_of_a_transfer_dtype_limits_the_error_of_a_layer(kept, wire, digit, way):
    options, strategy = WAYS[way]
    exact = kept(options, strategy)
    lossy = kept({**options, "a2a_dtype": wire}, strategy)
    for got, expected in zip(lossy, exact, strict=True):
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert largest(a - b) <= (2 if i else 1) * digit * largest(b), i
    assert not torch.equal(lossy[0][0], exact[0][0])


def test_ranks_send_all_row_chunks_before_experts_run_and_backward_has_the_reverse_order(monkeypatch):
    lines = []
    monkeypatch.setattr(background, "start", lambda f, rows: lines.append("start") or (lambda: f(rows)))
    x = torch.randn(4, 2, requires_grad=True)
    counts = Counts(*[torch.full((1, 1), 4)] * 3)
    monkeypatch.setattr(exchange, "_counts", lambda *_: (counts, counts))
    names, numbers = iter("01"), iter(range(2))

    def noted(line):
        return lambda rows: lines.append(line) or rows.clone()

    def diary(*_):
        name = next(names)
        return AllToAll(forth=noted(f"there {name}"), back=noted(f"back {name}"))

    monkeypatch.setattr(exchange, "_all_to_all", diary)

    def expert_fn(rows, *regrouping):
        i = next(numbers)
        lines.append(f"experts {i}")
        rows = rows * 2
        rows.register_hook(lambda _: lines.append(f"experts {i} backward"))
        return rows

    options = exchange.ExchangeOptions(group=None, strategy=Strategy(overlap=2))
    y = exchange.exchange_rows(x, torch.tensor([4]), options, expert_fn, None)
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


def fails_in_the_second_chunk(rank):
    """Run a layer whose experts raise an error on rank 1 while other ranks wait for rows of rank 1."""
    guard.set_timeout(1)
    layer = MoELayer(dataclasses.replace(CONFIG, num_experts=3), make_topology([3]), seed=2)
    layer.follow(Strategy(overlap=3))
    original, calls = layer.experts.run_unsorted, []

    def fail(_):
        raise ValueError("a broken expert")

    def run(rows, *others, **named):
        calls.append(rows)
        out = original(rows, *others, **named)
        if rank == 1 and len(calls) == 2:
            out.register_hook(fail)
        return out

    layer.experts.run_unsorted = run
    layer(torch.randn(12, CONFIG.model_dim, requires_grad=True))[0].sum().backward()


def test_an_error_in_the_experts_of_one_rank_ends_the_other_ranks():
    message, _ = mortal.run(fails_in_the_second_chunk, 3, range(3))
    assert message.pop(1) == "ValueError: a broken expert"
    for rank, sentence in zip((0, 2), message, strict=True):
        start = f"CommunicationError: rank {rank} could not finish the exchange of rows: "
        assert sentence.startswith(start), sentence


def traffic(strategy, tokens, experts):
    """Return the numbers of messages and bytes that this rank sends in a forward pass."""
    topology = make_topology([experts], 4, 2)
    layer = MoELayer(dataclasses.replace(CONFIG, num_experts=experts, top_k=experts), topology, seed=2)
    layer.follow(strategy)
    width = 1 + max(other.num_local for other in layer.calls.layers)  # A call ID precedes the row counts.
    rank, sent = dist.get_rank(), {"messages": 0, "bytes": 0, "across": 0, "counts": []}
    original = dist.all_to_all_single

    def counting(out, rows, receive=None, send=None, group=None, **kwargs):
        if rows.is_floating_point():
            members = dist.get_process_group_ranks(group)
            for other, n in zip(members, send, strict=True):
                sent["messages"] += other != rank and n > 0
                sent["bytes"] += (other != rank) * n * rows.shape[1] * rows.element_size()
                sent["across"] += other // 2 != rank // 2 and n > 0
        else:
            sent["counts"].append((dist.get_world_size(group), rows.numel() / width))
        return original(out, rows, receive, send, group=group, **kwargs)

    dist.all_to_all_single = counting
    try:
        layer(torch.randn(tokens, CONFIG.model_dim))
    finally:
        dist.all_to_all_single = original
    return sent


@pytest.mark.parametrize("overlap", (1, 4))
@pytest.mark.parametrize("experts, degree", [(4, 1), (2, 1), (2, 2)])
def test_the_numbers_of_sent_messages_and_bytes_equal_formulas(ranks, experts, degree, overlap):
    tokens, world, local, row = 8, 4, 2, 6 * 4
    # Every token is sent to `degree` ranks of each expert and back.
    rows = tokens * experts * degree // world
    strategy = Strategy(adaptive_r=degree, overlap=overlap)
    for sent in ranks(4).run(traffic, strategy, tokens, experts):
        assert sent["messages"] == 2 * overlap * (world - 1)
        assert sent["across"] == 2 * overlap * (world - local)
        assert sent["bytes"] == 2 * rows * (world - 1) * row
        assert sent["counts"] == [(world, world)]
    strategy = dataclasses.replace(strategy, algorithm="2dh")
    for sent in ranks(4).run(traffic, strategy, tokens, experts):
        nodes = world // local
        assert sent["messages"] == 2 * overlap * (local - 1 + nodes - 1)
        assert sent["across"] == 2 * overlap * (nodes - 1)
        within, across = (local - 1) * nodes * rows, (nodes - 1) * local * rows
        assert sent["bytes"] == 2 * (within + across) * row
        assert sent["counts"] == [(local, world), (nodes, world)]


def test_ranks_that_gather_expert_weights_send_call_ids_but_no_rows(ranks):
    for sent in ranks(4).run(traffic, Strategy(adaptive_r=0), 8, 4):
        assert (sent["messages"], sent["counts"]) == (0, [(4, 4)])
