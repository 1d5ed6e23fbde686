"""What a process reads of torchrun's environment before fairseq's main, on a GPU that is not here.

Covered: ranks that see all GPUs of their node, and ranks that see their own alone, as under Slurm.
"""

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_tutel.launch import join_torchrun


@pytest.mark.parametrize(("visible", "device"), [(4, 3), (1, 0)])
def test_a_rank_takes_its_own_of_the_gpus_that_it_sees(monkeypatch, visible, device):
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1"), ("WORLD_SIZE", "8"), ("RANK", "7"),
        ("LOCAL_RANK", "3"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    cfg = OmegaConf.create(
        {
            "common": {"cpu": False},
            # As stock has it by then: no method was found, and the world is what one node sees.
            "distributed_training": {
                "distributed_init_method": None, "distributed_world_size": 1, "ddp_backend": "pytorch_ddp",
            },
        }
    )  # fmt: skip
    join_torchrun(cfg)
    joined = cfg.distributed_training
    assert taken == [joined.device_id] == [device]
    assert (joined.distributed_rank, joined.distributed_world_size) == (7, 8)
    assert joined.ddp_backend == "pytorch_ddp"
