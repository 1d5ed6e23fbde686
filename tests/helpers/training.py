"""A small training run, which must have equal results on any number of ranks.

The fp64 model has two MoE layers and a dense layer. The ranks divide the four micro-batches of an update.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import plans
import torch
import torch.distributed as dist
from option_values import WAYS_TO_CHOOSE, draws
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import MoEConfig, MoELayer, make_topology
from fairseq_tutel.checkpoint.experts import gather_experts, release
from fairseq_tutel.inference.pregate import pregate
from fairseq_tutel.moe.balance import update_biases
from fairseq_tutel.parallel import collectives
from fairseq_tutel.parallel.gradients import (
    clip_gradients,
    global_grad_norm,
    reduce_dense_gradients,
    reduce_expert_gradients,
)
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.zero_state import ZeroState
from fairseq_tutel.plans.executors.backend import PlanBackend

UPDATES, MICRO_BATCHES = 20, 4
MODEL_DIM = 6
CLIP_NORM = 2.0


@dataclass(frozen=True)
class Layout:
    """Describes the distribution of experts over ranks.

    A layer has `experts` experts, an EP group has `ranks` ranks (0 means all ranks), and `degree` is the
    option adaptive_r.
    """

    experts: int = 4
    ranks: int = 0
    degree: int = 1


LAYOUTS = {
    "four": Layout(),
    "four, gathered": Layout(degree=0),
    "four, two replicas": Layout(ranks=2),
    "four on every rank": Layout(ranks=1),
    "two, two replicas": Layout(experts=2, ranks=2),
    "slices, r 0": Layout(experts=2, degree=0),
    "slices, r 1": Layout(experts=2),
    "slices, r 2": Layout(experts=2, degree=2),
}
# Each entry has the number of ranks per node (0 ignores nodes) and the number of chunks.
WAYS = {"plain": (0, 1), "chunks": (0, 3), "nodes": (2, 1), "nodes, chunks": (2, 2)}
# Each entry has the ranks per node, the number of chunks, and the generator of the all-to-all plan.
PLANNED = {"plans": (0, 1, "linear"), "plans, chunks": (0, 3, "two_hops")}
# These ways to choose experts draw no random numbers, which would depend on the number of ranks.
CHOOSING: dict[str, dict[str, Any]] = {
    "tokens": {},
    "experts": {"choice": "experts"},
    "groups": {"expert_groups": 2},
    **{", ".join(way): way for way in WAYS_TO_CHOOSE if not draws(way)},
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


@dataclass(frozen=True)
class Training:
    """Holds the options of a training run; the options from `exchange` on do not change the results."""

    optimizer: str
    top_k: int
    capacity_factor: float
    drop_policy: str = "position"
    gate: str = "linear"
    choice: str = "tokens"  # see CHOOSING
    scores: str = "softmax"
    normalize: str = "before"
    prescore: bool = False
    bias: bool = False
    beside: str = "none"
    exchange: str = "ragged"
    layout: str = "four"  # LAYOUTS has all values of this option.
    way: str = "plain"  # WAYS and PLANNED have all values of this option.
    recompute: str = "no"
    pregate: int = 0

    def options(self) -> dict[str, Any]:
        """Return the MoEConfig options of the model's MoE layers."""
        layout, (ranks_per_node, chunks, plan) = LAYOUTS[self.layout], self._way
        return {
            **CHOOSING[self.choice],
            "num_experts": layout.experts,
            "top_k": self.top_k,
            "capacity_factor": self.capacity_factor,
            "drop_policy": self.drop_policy,
            "gate_type": self.gate,
            "score_function": self.scores,
            "normalize_gate": self.normalize,
            "prescore": self.prescore,
            "balance_bias": self.bias,
            "shared_experts": 1 if self.beside == "shared" else 0,
            "residual": self.beside == "residual",
            "cmr": self.beside == "cmr",
            "exchange": self.exchange,
            "a2a_algorithm": plan or ("2dh" if ranks_per_node > 0 else "linear"),
            "adaptive_r": layout.degree,
            "a2a_ffn_overlap_degree": chunks,
        }

    def topology(self) -> Topology:
        """Return the process groups of this rank; all ranks must call this method."""
        layout = LAYOUTS[self.layout]
        world = dist.get_world_size() if dist.is_initialized() else 1
        placed = plans.placed(*plans.of(2), *plans.of(4)) if self._way[2] else ()
        collectives.use(PlanBackend(placed) if placed else None)
        return make_topology([layout.experts], min(layout.ranks or world, world), self._way[0])

    @property
    def _way(self) -> tuple[int, int, str]:
        if self.way in WAYS:
            return *WAYS[self.way], ""
        ranks_per_node, chunks, plan = PLANNED[self.way]
        return ranks_per_node, chunks, f"plan:{plan}_all_to_all"


class Model(nn.Module):
    """This model has a MoE layer, a dense layer with a residual connection, and another MoE layer."""

    def __init__(self, training: Training, topology: Topology) -> None:
        super().__init__()
        self.recompute = training.recompute
        config = MoEConfig(
            model_dim=MODEL_DIM,
            hidden_dim=8,
            gate_projection_dim=3,
            balance_loss="gshard:1,gshard_all:0.5,gshard_sequence:0.5,z:0.1",
            bias_update_rate=0.05,
            **training.options(),
        )
        self.first = MoELayer(config, topology, seed=1, name="first").double()
        self.dense = nn.Linear(MODEL_DIM, MODEL_DIM).double()
        self.last = MoELayer(config, topology, seed=1, name="last").double()
        generator = torch.Generator().manual_seed(1)
        for parameter in self.dense.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
        pregate([self.first, self.last], training.pregate)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the model's output and the sum of the balance losses."""
        y, balance_first = self._moe(self.first, x, mask)
        y = torch.tanh(self.dense(y)) + x
        y, balance_last = self._moe(self.last, y, mask)
        return y, balance_first + balance_last

    def _moe(self, layer: MoELayer, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            y, output = layer(x, mask)
            gates = 0.0 if output.cmr_sum is None else 0.1 * output.cmr_sum
            return y, output.balance_loss + gates

        if self.recompute == "no":
            return forward(x)
        return checkpoint(forward, x, use_reentrant=self.recompute == "reentrant")


def micro_batch(update: int, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return input, target and padding mask of a micro-batch, which may be empty or have only padding."""
    generator = torch.Generator().manual_seed(1000 * update + index)
    num_tokens = 0 if (update, index) == (3, 1) else 3 + (5 * update + 7 * index) % 11
    x = torch.randn(num_tokens, MODEL_DIM, generator=generator, dtype=torch.float64)
    mask = torch.arange(num_tokens) % 5 == 4
    if (update + index) % 6 == 5:
        mask[:] = True
    return x, x.flip(1), mask


def backward_update(
    model: Model, update: int, after_each: Callable[[], object] = lambda: None
) -> tuple[Tensor, Tensor]:
    """Accumulate an update's gradients; return the sums of losses and real tokens over all ranks."""
    world, rank = place_in_world()
    device = model.dense.weight.device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for index in range(rank, MICRO_BATCHES, world):
        x, target, mask = (tensor.to(device) for tensor in micro_batch(update, index))
        y, balance = model(x.requires_grad_(), mask)
        real = (~mask).sum()
        loss = (y - target).square()[~mask].sum() + 0.1 * real * balance
        loss.backward()
        after_each()
        sums += torch.stack([loss.detach(), real.double()])
    if world > 1:
        dist.all_reduce(sums)
    loss_sum, tokens = sums
    return loss_sum, tokens


def place_in_world() -> tuple[int, int]:
    """Return the number of ranks and the number of this rank."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def outcome(
    model: Model, topology: Topology, losses: list[Tensor], norms: list[Tensor]
) -> dict[str, Tensor]:
    """Return a run's losses and gradient norms and, on rank 0, all weights."""
    gather_experts(model, topology)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    release(model)
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), **weights}


def train(training: Training, updates: int = UPDATES, device: str = "cpu") -> dict[str, Tensor]:
    """Train the model, and return the losses, the gradient norms and, on rank 0, all weights."""
    world, _ = place_in_world()
    topology = training.topology()
    model = Model(training, topology).to(device)
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[training.optimizer](parameters)
    losses, norms = [], []
    for update in range(updates):
        optimizer.zero_grad()
        loss_sum, tokens = backward_update(model, update)
        if world > 1:
            reduce_dense_gradients(parameters, world)
            reduce_expert_gradients(parameters, topology)
        for parameter in parameters:
            parameter.grad *= world / tokens
        norm = global_grad_norm(parameters, topology)
        clip_gradients(parameters, CLIP_NORM, norm)
        optimizer.step()
        update_biases(model)
        losses.append(loss_sum / tokens)
        norms.append(norm)
    return outcome(model, topology, losses, norms)


def train_in_partitions(
    training: Training, stage: int, offload: bool, updates: int = 4, device: str = "cpu"
) -> dict[str, Tensor]:
    """Train with ZeRO or optimizer offload, and return the losses, the gradient norms and the weights."""
    world, _ = place_in_world()
    place = training.topology()
    model = Model(training, place).to(device)
    parameters = list(model.parameters())
    # A bucket of 600 bytes holds several small parameters, and some parameters are larger.
    zero = ZeroState(parameters, place, stage, offload, bucket_bytes=600)
    optimizer = OPTIMIZERS[training.optimizer](zero.parameters)
    losses, norms = [], []
    for update in range(updates):
        zero.zero_grad()
        loss_sum, tokens = backward_update(model, update, zero.reducer.finish_backward)
        if stage > 0:
            zero.reducer.reduce()
        elif world > 1:
            reduce_dense_gradients(parameters, world)
            reduce_expert_gradients(parameters, place)
        zero.multiply(world / float(tokens))
        norms.append(zero.clip(CLIP_NORM))
        zero.step(optimizer, optimizer.step)
        update_biases(model)
        losses.append(loss_sum / tokens)
    return outcome(model, place, losses, norms)
