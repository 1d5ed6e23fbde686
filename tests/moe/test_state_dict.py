"""State dicts have this rank's experts or all experts; a rank loads only its experts."""

import pytest
import torch

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.parallel.groups import Topology

CONFIG = MoEConfig(model_dim=4, hidden_dim=6, num_experts=4)


def layer(rank: int = 0, size: int = 1, seed: int = 1, config: MoEConfig = CONFIG) -> MoELayer:
    topology = Topology(world_size=size, rank=rank, expert_parallel_size=size)
    return MoELayer(config, topology, seed=seed)


def test_names_and_shapes_have_the_documented_format():
    shapes = {name: tuple(tensor.shape) for name, tensor in layer().state_dict().items()}
    assert shapes == {
        "gate.weight": (4, 4),
        "experts.fc1_weight": (4, 6, 4),
        "experts.fc1_bias": (4, 6),
        "experts.fc2_weight": (4, 4, 6),
        "experts.fc2_bias": (4, 4),
    }


@pytest.mark.parametrize("size", (1, 2, 4))
def test_a_rank_loads_its_part_of_all_experts(size):
    saved = layer(seed=9).state_dict()
    for rank in range(size):
        part = layer(rank, size)
        part.load_state_dict(saved)
        count = 4 // size
        for name, tensor in part.experts.expert_parameters().items():
            expected = saved[f"experts.{name}"][rank * count : (rank + 1) * count]
            assert torch.equal(tensor, expected), name
        assert torch.equal(part.gate.weight, saved["gate.weight"])


def test_a_state_dict_has_only_local_experts_until_the_experts_are_gathered():
    part, whole = layer(1, 2), layer()
    assert part.state_dict()["experts.fc1_bias"].shape == (2, 6)
    part.experts.save_as(whole.experts.expert_parameters())
    assert torch.equal(part.state_dict()["experts.fc1_bias"], whole.experts.fc1_bias)


@pytest.mark.parametrize("change", [{"num_experts": 8}, {"num_experts": 2}, {"hidden_dim": 5}], ids=str)
def test_a_wrong_shape_raises_a_one_sentence_error(change):
    other = MoEConfig(**{"model_dim": 4, "hidden_dim": 6, "num_experts": 4, **change})
    saved = layer(config=other).state_dict()
    with pytest.raises(ValueError, match=r"checkpoint's experts\.fc1_weight has shape .* needs") as e:
        layer().load_state_dict(saved)
    for part in ("(4, 6, 4)", "--moe-expert-count", "--moe-expert-ffn-dim"):
        assert part in str(e.value)


def test_a_loaded_part_does_not_keep_the_memory_of_all_experts():
    stack = layer(1, 2).experts
    taken = stack._take("fc1_bias", torch.arange(24.0).view(4, 6)[2:])
    assert torch.equal(taken, torch.arange(12.0, 24.0).view(2, 6))
    assert taken.untyped_storage().nbytes() == taken.nbytes
