"""Checkpoints of experts on several ranks have the same content for any number of ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_tutel import MoEConfig, MoELayer, make_topology
from fairseq_tutel.checkpoint import experts as checkpoint
from fairseq_tutel.checkpoint.experts import gather_experts, gather_to_first, release
from fairseq_tutel.parallel.groups import Topology

CONFIG = MoEConfig(model_dim=4, hidden_dim=6, num_experts=4, hidden_layer_norm=True)


def model(topology: Topology | None, seed: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = [MoELayer(CONFIG, topology, seed=seed, name=name) for name in ("a", "b")]
    return nn.Sequential(layers[0], nn.Identity(), layers[1]).to(dtype)


def save(parallel: int, dtype: torch.dtype) -> dict[str, Tensor]:
    topology = make_topology([4], parallel)
    split = model(topology, dtype=dtype)
    gather_experts(split, topology)
    state = {name: tensor.clone() for name, tensor in split.state_dict().items()}
    release(split)
    local = 4 // topology.expert_parallel_size
    assert split.state_dict()["0.experts.fc1_bias"].shape[0] == local
    return state


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    "world_size, parallel, dtype", [(2, 0, F32), (4, 2, F32), (4, 1, F32), (4, 2, BF16)]
)
def test_rank_0_saves_the_same_checkpoint_as_a_run_on_one_rank(ranks, world_size, parallel, dtype):
    first, *_ = ranks(world_size).run(save, parallel, dtype)
    same(first, model(None, dtype=dtype).state_dict())


def load(parallel: int, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Load a state dict on all ranks, and return the state dict that rank 0 saves afterwards."""
    topology = make_topology([4], parallel)
    split = model(topology, seed=2)
    split.load_state_dict(saved)
    gather_experts(split, topology)
    return dict(split.state_dict())


@pytest.mark.parametrize("saved_on, loaded_on, parallel", [(2, 4, 0), (4, 2, 0), (2, 4, 2)])
def test_a_checkpoint_loads_on_another_number_of_ranks(ranks, saved_on, loaded_on, parallel):
    saved = ranks(saved_on).run(save, 0, torch.float32)[0]
    same(ranks(loaded_on).run(load, parallel, saved)[0], saved)


def gather_moments(parallel: int) -> Tensor | None:
    topology = make_topology([4], parallel)
    # Each row has a local expert's global ID and the number of this rank's EP replica.
    held = [[float(e), dist.get_rank() // topology.expert_parallel_size] for e in topology.local_experts(4)]
    return gather_to_first(torch.tensor(held), topology)


@pytest.mark.parametrize("parallel", (2, 4))
def test_rank_0_gathers_expert_tensors_from_its_ep_group_in_the_order_of_global_ids(ranks, parallel):
    first, *others = ranks(4).run(gather_moments, parallel)
    assert first.tolist() == [[float(e), 0.0] for e in range(4)]
    assert others == [None] * 3


def gather_in_pieces(parallel: int, limit: int) -> tuple[dict[str, Tensor], int]:
    """Save with at most `limit` bytes per gather; return the state dict and the most bytes of a gather."""
    stock, largest = dist.gather, [0]

    def gather(tensor: Tensor, parts: list[Tensor] | None, **where: Any) -> None:
        largest.append(sum(part.nbytes for part in parts or []))
        stock(tensor, parts, **where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "GATHERED_BYTES", limit)
        patch.setattr(dist, "gather", gather)
        return save(parallel, torch.float32), max(largest)


@pytest.mark.parametrize("parallel", [2, 4])
def test_rank_0_gathers_a_limited_number_of_bytes_at_a_time(ranks, parallel):
    (saved, largest), *_ = ranks(4).run(gather_in_pieces, parallel, 100)
    assert 80 < largest <= 100
    same(saved, model(None).state_dict())


def states(parameter):
    return {"moment": torch.zeros_like(parameter), "scale": torch.ones(len(parameter), 1, 1)}


def test_an_optimizer_state_without_a_hidden_dimension_is_not_split_into_expert_shards(tmp_path):
    config, written = MoEConfig(model_dim=4, hidden_dim=8, num_experts=2), []
    for rank in range(4):
        place = Topology(world_size=4, rank=rank, expert_parallel_size=4, share_groups={2: None})
        split = MoELayer(config, place, seed=1)
        written.append(checkpoint.CopiedExperts(split, place, states).write(tmp_path, lambda: None))
    found = {stack.name: stack.shape for stack in checkpoint._joined(written, tmp_path)}
    shapes = {"fc1_weight": (2, 8, 4), "fc1_weight.moment": (2, 8, 4), "fc1_weight.scale": (2, 1, 1)}
    assert found == found | shapes


@pytest.mark.parametrize("content", [b"ab", None])
def test_a_missing_or_incomplete_checkpoint_file_of_another_rank_raises_an_error(tmp_path, content):
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(OSError, match="is missing or has the wrong size"):
        checkpoint.records_of([checkpoint.Written(sizes={"a": 3})], tmp_path)


def test_a_save_that_lacks_a_piece_of_an_expert_tensor_raises_an_error(tmp_path):
    written = checkpoint.CopiedExperts(model(None), Topology(), states).write(tmp_path, lambda: None)
    stack, pieces = next(iter(written.pieces.items()))
    written.pieces[stack] = dict(list(pieces.items())[1:])
    with pytest.raises(ValueError, match=r"3 pieces of .* were written, but 4 expected"):
        checkpoint._joined([written], tmp_path)
