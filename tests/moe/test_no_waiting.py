"""Routing, losses and metrics on a GPU read no tensor on the host and wait for no copy to the GPU."""

import pytest
import torch
from option_values import ROUTING, E, config_of, mixed
from torch.overrides import TorchFunctionMode

from fairseq_tutel.moe import balance, metrics
from fairseq_tutel.moe.routing import GateOutput, decide
from fairseq_tutel.moe.slots import Capacity, MicroBatch

COPIES = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, torch.from_numpy)
RULES = ({}, *mixed(ROUTING))


class NoCopies(TorchFunctionMode):
    """This mode raises an error in functions that copy a number from the host into a tensor."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in COPIES, f"{function.__name__} copies from the host, and waits"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("factor", (0.0, 0.5, -0.5))
@pytest.mark.parametrize("padded", (False, True), ids=("real", "padded"))
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_routing_and_losses_and_metrics_need_no_host_synchronization(rules, padded, factor):
    logits_TE = torch.randn(12, E, device="meta")
    real_T = torch.ones(12, dtype=torch.bool, device="meta") if padded else None
    batch = MicroBatch(
        top_k=2, capacity=Capacity(factor=factor), real_T=real_T, time_first=(3, 4), training=True
    )
    with NoCopies():
        decided = decide(logits_TE, config_of(rules), batch)
        gate = GateOutput(
            logits_TE=logits_TE, clean_TE=logits_TE, noise=1.0, sentences=(4, 3), time_first=True
        )
        found = balance.balance_losses(dict.fromkeys(balance.LOSSES, 1.0), decided, gate)
        rows_LN, _ = metrics.metric_rows([metrics.count_routing(decided)])
    assert decided.source_of_R.device.type == rows_LN.device.type == "meta"
    assert all(loss.shape == () and loss.device.type == "meta" for loss in found.values())
