"""Programs as Tutel's users write them, on `fairseq_tutel.moe_layer`, on one rank and on two."""

import contextlib
import copy
import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tutel_case import OwnExperts, alone

import fairseq_tutel as ft

D, BATCH, TIME = 6, 4, 5


FFN = {"type": "ffn", "hidden_size_per_expert": 8, "activation_fn": lambda x: F.relu(x)}
KINDS = {
    "ffn": {**FFN, "num_experts_per_device": 2},
    "one expert a rank": {**FFN, "num_experts_per_device": 1},
    "one expert on all ranks": {**FFN, "num_experts_per_device": -2},
    "custom": {"type": "custom", "module": OwnExperts, "num_experts_per_device": 2},
    "whole custom": {"type": "custom", "module": OwnExperts, "num_experts_per_device": -2},
}


def world_and_rank() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


class Example(nn.Module):
    def __init__(self, experts, rank: int, group=None):
        super().__init__()
        self.moe = ft.moe_layer(
            gate_type={"type": "top", "k": 2, "capacity_factor": 1.0, "fp32_gate": True},
            experts=experts,
            model_dim=D,
            scan_expert_func=lambda name, param: setattr(param, "skip_allreduce", True),
            result_func=lambda y: (y, y.l_aux),
            seeds=(1, rank + 1, 1),
            group=group,
        )
        self.head = nn.Linear(D, D)

    def forward(self, x):
        y, l_aux = self.moe(x)
        return F.log_softmax(self.head(y).sum(dim=1), dim=1), l_aux


def loss_of(model, rank: int, step: int):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(BATCH, TIME, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(D, (BATCH,), generator=generator)
    output, l_aux = model(x)
    return F.nll_loss(output, labels) + 0.01 * l_aux


def all_but_skipped(model) -> None:
    """Average gradients as Tutel's example does."""
    world, _ = world_and_rank()
    for p in model.parameters():
        if world > 1 and not hasattr(p, "skip_allreduce"):
            p.grad /= world
            dist.all_reduce(p.grad)


class Program:
    """The example: a file of this rank is loaded if there is one, and written in the end."""

    def __init__(self, kind: str, pattern: str = ""):
        world, rank = world_and_rank()
        self.rank = rank
        self.path = pattern.replace("{rank}", str(rank)).replace("{size}", str(world))
        experts = KINDS[kind]
        if world == 1:
            experts = {**experts, "num_experts_per_device": 2}
        self.model = Example(experts, rank).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, self.rank, step)
            loss.backward()
            all_but_skipped(self.model)
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def save(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.path)

    def load(self):
        state = torch.load(self.path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def twice(kind: str, pattern: str) -> None:
    first = Program(kind, pattern)
    first.train(range(2))
    first.save()
    expected = first.train(range(2, 4))
    second = Program(kind, pattern)
    with torch.no_grad():
        for p in second.model.parameters():
            p.fill_(torch.nan)
    second.load()
    assert second.train(range(2, 4)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_run_twice_goes_on_where_it_stopped(ranks, tmp_path, kind):
    pattern = str(tmp_path / "{rank}-of-{size}.ckpt")
    ranks(2).run(twice, kind, pattern)
    twice(kind, pattern)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-of-1.ckpt", "0-of-2.ckpt", "1-of-2.ckpt"]


def refused(kind: str, pattern: str, path: str) -> str:
    """Save a file of this rank, and open the one of `path`, or the other rank's."""
    program = Program(kind, pattern)
    program.save()
    dist.barrier()
    before = [p.clone() for p in program.model.parameters()]
    program.path = path or pattern.replace("{rank}", str(1 - program.rank))
    try:
        program.load()
    except ValueError as error:
        assert all(map(torch.equal, before, program.model.parameters()))
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        ("ffn", ("experts 0 to 1 of 4", "experts 2 to 3 of 4")),
        ("one expert on all ranks", ("expert 0 of 1, shard 0 of 2", "expert 0 of 1, shard 1 of 2")),
    ],
)
def test_another_ranks_file_is_refused(ranks, tmp_path, kind, held):
    messages = ranks(2).run(refused, kind, str(tmp_path / "{rank}"), "")
    for message, mine, other in zip(messages, held, reversed(held), strict=True):
        assert f"fc1_weight holds {other}" in message and f"this rank has {mine};" in message
        assert "--moe" not in message and message.count("\n") == 0


def test_a_file_of_fewer_experts_is_refused_though_its_shapes_are_a_ranks(ranks, tmp_path):
    path = str(tmp_path / "0-of-1")
    Program("ffn", path).save()
    messages = ranks(2).run(refused, "ffn", str(tmp_path / "{rank}"), path)
    assert all("holds experts 0 to 1 of 2, but this rank has" in m for m in messages), messages


def opened(path: str):
    program = Program("one expert a rank", path)
    program.load()
    return program.model.moe.experts.fc1_weight.detach()


def test_each_rank_takes_its_part_of_a_file_that_one_process_saved(ranks, tmp_path):
    one = Program("one expert a rank", str(tmp_path / "0-of-1"))
    one.save()
    parts = ranks(2).run(opened, one.path)
    assert torch.equal(torch.cat(parts), one.model.moe.experts.fc1_weight)


@contextlib.contextmanager
def logged():
    """Yield the list of messages that are logged in the context."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fairseq_tutel").addHandler(handler)
    yield records
    logging.getLogger("fairseq_tutel").removeHandler(handler)


def other_forms(kind: str) -> list[str]:
    """Load a part that does not name its experts, and all experts; return what was logged."""
    program = Program(kind)
    expected = [p.clone() for p in program.model.parameters()]
    state = copy.deepcopy(program.model.state_dict())
    parts = [None, None]
    dist.all_gather_object(parts, dict(state))
    experts = [name for name in state if ".experts." in name]
    whole = {**state, **{name: torch.cat([part[name] for part in parts]) for name in experts}}
    with logged() as records:
        for form in (dict(state), whole):
            with torch.no_grad():
                for p in program.model.parameters():
                    p.zero_()
            program.model.load_state_dict(form)
            assert all(map(torch.equal, expected, program.model.parameters()))
    return records


def test_a_part_that_does_not_say_whose_it_is_and_all_experts_are_taken(ranks):
    logged = ranks(2).run(other_forms, "ffn")
    for records, held in zip(logged, ("experts 0 to 1 of 4", "experts 2 to 3 of 4"), strict=True):
        assert len(records) == 1 and f"they are loaded as {held}" in records[0]


class SharedAverage:
    """As Tutel's distributed optimizer: averages what has no `_tutel_expert`, and leaves the rest."""

    def __init__(self, parameters, lr: float):
        self.parameters = list(parameters)
        self.inner = torch.optim.SGD(self.parameters, lr=lr, momentum=0.9)

    def step(self) -> None:
        for p in self.parameters:
            if not hasattr(p, "_tutel_expert"):
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        self.inner.step()


def beside_one_process(kind: str) -> list[str]:
    """Train, and compare with one process with all tokens and experts; return the marked parameters."""
    world, rank = world_and_rank()
    model = Example(KINDS[kind], 0).double()
    whole = Example(
        {**KINDS[kind], "num_experts_per_device": model.moe.num_global_experts}, 0, alone()
    ).double()
    marked = [name for name, p in model.named_parameters() if hasattr(p, "_tutel_expert")]
    if kind == "custom":  # each rank draws its modules at once: not the same experts
        parts = [None, None]
        dist.all_gather_object(parts, model.moe.experts.W.detach())
        whole.moe.experts.W.data.copy_(torch.cat(parts))
    optimizer = SharedAverage(model.parameters(), lr=0.3)
    one = torch.optim.SGD(whole.parameters(), lr=0.3, momentum=0.9)
    for step in range(3):
        for each in (model, whole):
            each.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        losses = [loss_of(whole, r, step) for r in range(world)]
        sum(losses).backward()
        torch.testing.assert_close(loss, losses[rank])
        for name, p in whole.named_parameters():
            if name not in marked:
                p.grad /= world
        one.step()
    return marked


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_knows_experts_by_tutels_mark_trains_as_one_process(ranks, kind):
    names = {"custom": ("W",), "whole custom": ()}.get(
        kind, ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    )
    assert ranks(2).run(beside_one_process, kind) == [[f"moe.moe.experts.{n}" for n in names]] * 2


def assignments(kind: str, per_device: float) -> list[str]:
    with logged() as records:
        Example({**KINDS[kind], "num_experts_per_device": per_device}, 0)
    return records


def test_whole_copies_of_an_expert_on_several_ranks_are_said(ranks):
    for records in ranks(2).run(assignments, "whole custom", -2):
        assert len(records) == 1 and "2 ranks hold a replica of each expert" in records[0]
    assert ranks(2).run(assignments, "ffn", -2) == ranks(2).run(assignments, "custom", 2) == [[], []]


def kept_rows(together: bool, per_device: int) -> int:
    """Return how many of this rank's tokens, 10 or 4, got a slot."""
    rank = dist.get_rank()
    experts = {**FFN, "num_experts_per_device": per_device}
    gate = {"type": "top", "capacity_factor": 0.5}
    layer = ft.moe_layer(gate, D, experts, seeds=(1, 2), tutel_capacity=True)
    torch.nn.init.zeros_(layer.gates[0].weight)  # all tokens to expert 0
    y = layer(torch.randn(10 if rank == 0 else 4, D), inequivalent_tokens=together)
    return int((y.abs().sum(dim=1) > 0).sum())


def test_tutels_capacity_goes_by_the_ranks(ranks):
    assert ranks(2).run(kept_rows, False, 1) == [2, 1]  # int(0.5 * 10 / 2), and of 4 tokens
    assert ranks(2).run(kept_rows, True, 1) == [2, 2]
    assert ranks(2).run(kept_rows, False, -2) == [6, 2]  # one expert: 5 and 2, up to a multiple of 2
    assert ranks(2).run(kept_rows, True, -2) == [6, 4]
