"""The moving average of a model with experts equals fairseq's."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.models.ema.ema import EMA
from torch import nn

from fairseq_tutel import MoEConfig, MoELayer, plugin
from fairseq_tutel.plugin.training.ema import ExpertEMA
from fairseq_tutel.plugin.training.own_layers import MoETrainer

plugin.register()


class _Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        config = MoEConfig(model_dim=4, hidden_dim=8, num_experts=2)
        self.layer = MoELayer(config, seed=1, name="layer")
        self.embedding, self.out = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("version", torch.tensor([3.0]))
        if tied:
            self.out.weight = self.embedding.weight

    def draw(self, seed):
        """Give all weights new values, and change the table."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.table += 1


def _config(wide, freq=1):
    return SimpleNamespace(
        store_ema=True,
        ema_decay=0.9,
        ema_seed_model=None,
        ema_fp32=wide,
        ema_update_freq=freq,
        ema_start_update=0,
    )  # fmt: skip


def test_a_model_without_experts_uses_the_average_class_of_fairseq():
    made = []
    for model in (nn.Linear(2, 2), _Model()):
        trainer = object.__new__(MoETrainer)
        trainer.cfg, trainer._model, trainer.device = SimpleNamespace(ema=_config(False)), model, None
        trainer._build_ema()
        made.append(type(trainer._ema))
    assert made == [EMA, ExpertEMA]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_averages_have_the_same_bits_as_fairseq_s(wide, half):
    model = _Model()
    model.draw(1)
    if half:
        model.bfloat16()
    ours, stock = ExpertEMA(model, _config(wide)), EMA(model, _config(wide), skip_keys={"table"})
    for update in range(1, 4):
        model.draw(update)
        for ema in (ours, stock):
            ema.step(model, update)
    for key, value in stock.get_model().state_dict().items():
        assert torch.equal(ours.get_model().state_dict()[key], value), key
    assert ours.fp32_params.keys() == stock.fp32_params.keys()
    for key, value in stock.fp32_params.items():
        assert torch.equal(ours.fp32_params[key], value), key
    assert ours.fp32_params == {} or (ours.fp32_params["out.weight"].dtype == torch.float32)
    assert not torch.equal(ours.get_model().out.weight, model.out.weight)


def test_a_resumed_run_averages_after_the_same_updates():
    """--ema-update-freq 3 averages after updates 3 and 6, as fairseq does without a resume."""
    model = _Model()
    model.draw(1)
    ours, stock = ExpertEMA(model, _config(False, 3)), EMA(model, _config(False, 3), skip_keys={"table"})
    for update in range(1, 9):
        if update == 5:  # a new process restores the average of the checkpoint
            state = dict(ours.get_model().state_dict())
            ours = ExpertEMA(model, _config(False, 3))
            ours.restore(state)
        model.draw(update)
        for ema in (ours, stock):
            ema.step(model, update)
        for key, value in stock.get_model().state_dict().items():
            assert torch.equal(ours.get_model().state_dict()[key], value), (update, key)


@pytest.mark.parametrize("wide", [False, True])
def test_tied_weights_are_averaged_once(wide):
    """fairseq's EMA decays a tied weight once for each of its names."""
    model = _Model(tied=True)
    model.draw(1)
    ema, first = ExpertEMA(model, _config(wide)), model.out.weight.detach().clone()
    model.draw(2)
    ema.step(model, 1)
    expected = 0.9 * first + 0.1 * model.out.weight.detach()
    torch.testing.assert_close(ema.get_model().out.weight.data, expected)
    torch.testing.assert_close(ema.get_model().embedding.weight.data, expected)


@pytest.mark.parametrize("wide", [False, True])
def test_restoring_averages_frees_the_averages_of_the_checkpoint(wide):
    saved, model = _Model(), _Model()
    saved.draw(5)
    ema, state = ExpertEMA(model, _config(wide)), dict(saved.state_dict())
    if wide:
        ema.build_fp32_params(state)
        assert torch.equal(ema.fp32_params["layer.experts.fc2_weight"], saved.layer.experts.fc2_weight)
    else:
        ema.restore(state)
        assert torch.equal(ema.get_model().layer.experts.fc2_weight, saved.layer.experts.fc2_weight)
    assert state == {}
