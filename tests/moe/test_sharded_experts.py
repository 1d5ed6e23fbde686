"""Experts and their optimizer states can be saved and loaded on different numbers of ranks."""

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
# Each pair (W, P) is a number of ranks and an EP size, for a model with two experts.
PLACES = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]


def model(size: int, seed: int = 1) -> tuple[nn.Module, object]:
    topology = make_topology([2], size)
    layers = [MoELayer(CONFIG, topology, seed=seed, name=name) for name in ("a", "b")]
    return nn.Sequential(*layers), topology


def states(parameter: Tensor) -> dict[str, Tensor]:
    """Return an optimizer state: a moment with the parameter's shape, and one scale per expert."""
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
    """Load saved experts into a model with another seed, and return the names of tensors that differ."""
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
def test_experts_saved_on_some_ranks_can_be_loaded_on_any_number_of_ranks(ranks, tmp_path, saved):
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
def test_every_expert_is_saved_once(ranks, tmp_path, topology, files):
    world, size = topology
    found = ranks(world).run(save, str(tmp_path), size)[0]
    assert found == [f"{n}.experts.{file}.safetensors" for n in (0, 1) for file in files]


def differing(parameter: Tensor) -> dict[str, Tensor]:
    return states(parameter) if dist.get_rank() == 0 else {}


def refused(folder: str, size: int, states: Callable, another: str = "") -> str:
    """Return the error of a failed save; `another` is a suffix of the folder on rank 1."""
    split, topology = model(size)
    with pytest.raises(ValueError) as caught:
        save_in_shards(split, topology, states, Path(folder + another * dist.get_rank()))
    return str(caught.value)


def test_ranks_with_different_optimizer_states_raise_an_error(ranks, tmp_path):
    for sentence in ranks(4).run(refused, str(tmp_path), 1, differing):
        assert "the ranks' optimizers differ; the last saved checkpoint is complete" in sentence


def test_all_ranks_raise_an_error_that_names_the_rank_that_cannot_write(ranks, tmp_path):
    # Rank 1 writes to another folder, which rank 0 has not created.
    message = ranks(2).run(refused, str(tmp_path / "a"), 2, states, "-elsewhere")
    for sentence in message:
        assert sentence.startswith("rank 1 could not write its experts to ")
        assert "No such file" in sentence
        assert "that all ranks share" in sentence
    assert not list((tmp_path / "a").glob("*.pt"))


def test_all_ranks_raise_an_error_if_rank_0_cannot_start_a_save(ranks, tmp_path):
    (tmp_path / "experts").write_text("a file where the folder should be")
    for sentence in ranks(2).run(refused, str(tmp_path), 2, states):
        assert "Not a directory" in sentence


def save_unseen(folder: str) -> str:
    """Save experts while rank 0 does not see the newest files of rank 1."""
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


def test_a_save_fails_if_rank_0_does_not_see_a_file_of_rank_1(ranks, tmp_path):
    for sentence in ranks(2).run(save_unseen, str(tmp_path)):
        assert "is missing or has the wrong size" in sentence
