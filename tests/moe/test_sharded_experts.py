"""Shards written on W ranks and read on others: weights and states, any P, replicas, slices."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_tutel import MoEConfig, MoELayer, make_topology
from fairseq_tutel.checkpoint import experts
from fairseq_tutel.checkpoint.experts import save_in_shards
from fairseq_tutel.checkpoint.shards import ShardedTensor, bind, write_file

CONFIG = MoEConfig(model_dim=4, hidden_dim=8, num_experts=2)
# (W, P): one rank, replicas, one expert a rank, one expert on two ranks.
PLACES = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]


def model(size: int, seed: int = 1) -> tuple[nn.Module, object]:
    topology = make_topology([2], size)
    layers = [MoELayer(CONFIG, topology, seed=seed, name=name) for name in ("a", "b")]
    return nn.Sequential(*layers), topology


def states(parameter: Tensor) -> dict[str, Tensor]:
    """A moment of the parameter's shape and a scale per expert."""
    scale = parameter.detach().new_ones(len(parameter), *[1] * (parameter.dim() - 1))
    return {"moment": parameter.detach() * 2, "scale": scale * 3}


def save(folder: str, size: int) -> list[str] | None:
    split, topology = model(size)
    records = save_in_shards(split, topology, states, Path(folder))
    state = {"model": split.state_dict(), "optimizer": {".".join(k): v for k, v in records.items()}}
    if topology.rank > 0:
        return None
    torch.save(state, Path(folder) / "checkpoint.pt")
    (shards,) = (Path(folder) / "experts").iterdir()
    return sorted(file.name for file in shards.iterdir())


def differences(folder: str, size: int) -> list[str]:
    """Load what was saved into a model of another seed, and name what is not as it was drawn."""
    expected, topology = model(size)
    loaded, _ = model(size, seed=2)
    path = Path(folder) / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    bind(state, path)
    loaded.load_state_dict(dict(state["model"]))
    wrong = []
    own = dict(expected.named_parameters())
    for name, parameter in loaded.named_parameters():
        if not torch.equal(parameter, own[name]):
            wrong.append(name)
        if ".experts." not in name:
            continue
        moment: ShardedTensor = state["optimizer"][f"{name}.moment"]
        part, stack = topology.part(2), expected.get_submodule(name.rpartition(".")[0])
        slicing = stack.slice_of(name.rpartition(".")[2])
        if not torch.equal(moment.read(part.first, part.num_local, slicing, part.index), own[name] * 2):
            wrong.append(f"{name}.moment")
        if not torch.equal(state["optimizer"][f"{name}.scale"].whole().flatten(), torch.full((2,), 3.0)):
            wrong.append(f"{name}.scale")
    return wrong


@pytest.mark.parametrize("saved", PLACES)
def test_what_some_ranks_save_all_others_load(ranks, tmp_path, saved):
    world, size = saved
    ranks(world).run(save, str(tmp_path), size)
    for world, size in PLACES:
        assert ranks(world).run(differences, str(tmp_path), size) == [[]] * world, (world, size)


@pytest.mark.parametrize(
    ("topology", "files"),
    [
        ((2, 1), ["experts-0000-0000", "experts-0001-0001"]),
        ((2, 2), ["experts-0000-0000", "experts-0001-0001"]),
        ((4, 2), ["experts-0000-0000", "experts-0001-0001"]),
        ((4, 4), [f"experts-000{e}-000{e}.slice-{i}-of-2" for e, i in itertools.product((0, 1), (0, 1))]),
    ],
)
def test_every_expert_is_written_once(ranks, tmp_path, topology, files):
    world, size = topology
    found = ranks(world).run(save, str(tmp_path), size)[0]
    assert found == [f"{n}.experts.{file}.safetensors" for n in (0, 1) for file in files]


def differing(parameter: Tensor) -> dict[str, Tensor]:
    return states(parameter) if dist.get_rank() == 0 else {}


def refused(folder: str, size: int, states: Callable, another: str = "") -> str:
    """Return why nothing is saved; rank 1 may get another folder."""
    split, topology = model(size)
    with pytest.raises(ValueError) as caught:
        save_in_shards(split, topology, states, Path(folder + another * dist.get_rank()))
    return str(caught.value)


def test_ranks_whose_optimizers_differ_are_told(ranks, tmp_path):
    for sentence in ranks(4).run(refused, str(tmp_path), 1, differing):
        assert "the ranks' optimizers differ; the last saved checkpoint is complete" in sentence


def test_a_rank_that_can_not_write_is_named_on_all(ranks, tmp_path):
    # A disk of its own, where rank 0 has made no folder.
    message = ranks(2).run(refused, str(tmp_path / "a"), 2, states, "-elsewhere")
    for sentence in message:
        assert sentence.startswith("rank 1 could not write its experts to ")
        assert "No such file" in sentence
        assert "that all ranks share" in sentence
    assert not list((tmp_path / "a").glob("*.pt"))


def test_a_first_rank_that_can_not_begin_is_heard_by_all(ranks, tmp_path):
    (tmp_path / "experts").write_text("a file where the folder should be")
    for sentence in ranks(2).run(refused, str(tmp_path), 2, states):
        assert "Not a directory" in sentence


def save_unseen(folder: str) -> str:
    """Rank 0 sees an older state of what rank 1 wrote."""
    split, topology = model(2)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(experts.folders, "PARENT", "seen")
            (Path(folder) / "seen").symlink_to(Path(folder) / "other")
            (Path(folder) / "other").mkdir()
            patch.setattr(experts, "write_file", lambda values, path: write_elsewhere(values, path))
        with pytest.raises(ValueError) as caught:
            save_in_shards(split, topology, states, Path(folder))
    return str(caught.value)


def write_elsewhere(values: dict, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    write_file(values, path)


def test_a_file_that_rank_0_does_not_see_is_no_checkpoint(ranks, tmp_path):
    for sentence in ranks(2).run(save_unseen, str(tmp_path)):
        assert "is missing or has the wrong size" in sentence
