"""ZeRO and offload in fairseq's optimizer wrappers, on one rank: updates, state and errors."""

import argparse
import copy

import pytest
import torch
from fairseq import optim, utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import MemoryEfficientFP16Optimizer
from omegaconf import OmegaConf

from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.optim.moe_optimizer import MoEOptimizerMixin
from fairseq_tutel.plugin.optim.zero import ZeroOptions, half_optimizer, zero_options
from fairseq_tutel.plugin.run_state import RUN

register()

SHAPES = [(3, 5), (), (7,), (2, 4, 3)]
OPTIONS = {
    "moe_adam": {"adam_betas": (0.9, 0.98), "adam_eps": 1e-6, "weight_decay": 0.1},
    "moe_sgd": {"momentum": 0.9, "weight_decay": 0.1},
    "moe_nag": {"momentum": 0.9, "weight_decay": 0.1},
    "moe_adagrad": {"weight_decay": 0.1},
    "moe_adadelta": {"adadelta_rho": 0.9, "adadelta_eps": 1e-3, "weight_decay": 0.1, "anneal_eps": False},
    "moe_adamax": {
        "adamax_betas": "(0.9, 0.98)", "adamax_eps": 1e-6, "weight_decay": 0.1,
        "no_bias_correction": False,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_rank():
    RUN.update(topology=Topology())


def root_of(name="moe_adam", offload=False, **common):
    """Return the configuration of a training run."""
    root = OmegaConf.structured(FairseqConfig)
    OmegaConf.set_struct(root, False)
    root.common.update(common)
    options = {"_name": name, "lr": [0.01], **OPTIONS[name]}
    if name == "moe_adam":
        options |= {"use_old_adam": False, "fp16_adam_stats": False, "tpu": False}
    root.optimizer = options
    root.optimization.lr = [0.01]
    root.task = {"moe_zero_stage": 0, "moe_offload_optimizer": offload}
    return root


def parameters_of(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def update(optimizer, parameters, number, clip=0.5, size=1.0):
    """Run an update as the Trainer does; in odd updates, the last parameter has no gradient."""
    generator = torch.Generator().manual_seed(number)
    optimizer.set_lr(0.01 / (1 + number))
    optimizer.zero_grad()
    used = parameters[: 3 if number % 2 else 4]
    loss = sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for p in used)
    optimizer.backward(size * loss)
    optimizer.all_reduce_grads(None)
    optimizer.multiply_grads(1 / 3)
    norm = optimizer.clip_grad_norm(clip)
    optimizer.step()
    return norm


@pytest.mark.parametrize("name", OPTIONS)
def test_an_offloaded_optimizer_has_the_results_of_the_optimizer(name):
    results = []
    for offload in (False, True):
        parameters = parameters_of()
        root = root_of(name, offload)
        optimizer = optim.build_optimizer(root.optimizer, parameters)
        assert isinstance(optimizer, MoEOptimizerMixin)
        assert (optimizer.zero is not None) == offload
        norms = [update(optimizer, parameters, number) for number in range(5)]
        assert max(norms) > 0.5  # clipped
        again = optim.build_optimizer(root_of(name, not offload).optimizer, parameters)
        saved = optimizer.state_dict()
        again.load_state_dict(copy.deepcopy(saved))
        results.append((parameters, norms, saved["state"]))
        update(again, parameters, 5)
    (plain, norms, state), (offloaded, norms_2, state_2) = results
    torch.testing.assert_close(norms_2, norms)
    for a, b in zip(plain, offloaded, strict=True):
        torch.testing.assert_close(b, a)
    assert state.keys() == state_2.keys()
    for index in state:
        torch.testing.assert_close(state_2[index], state[index])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_sharded_fp32_masters_equal_those_of_fairseq(precision):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    results = []
    for offload in (False, True):
        parameters = parameters_of(dtype)
        root = root_of(
            offload=offload, fp16_no_flatten_grads=True, fp16_init_scale=2**12, **{precision: True}
        )
        optimizer = half_optimizer(root, parameters)
        assert type(optimizer).__name__ == "FP16Optimizer"  # the Trainer compares this name
        norms = [update(optimizer, parameters, number) for number in range(4)]
        other = half_optimizer(
            root_of(offload=not offload, fp16_no_flatten_grads=True, **{precision: True}), parameters
        )
        inner = getattr(optimizer, "fp32_optimizer", None) or optimizer.wrapped_optimizer
        if not offload:
            assert inner.holds_masters
        saved = optimizer.state_dict()
        assert all(state["fp32_master"].dtype == torch.float32 for state in saved["state"].values())
        other.load_state_dict(saved)
        norms.append(update(other, parameters, 4))
        results.append((parameters, norms))
    (plain, norms), (sharded, norms_2) = results
    torch.testing.assert_close(norms_2, norms, rtol=1e-5, atol=1e-6)
    for a, b in zip(plain, sharded, strict=True):
        torch.testing.assert_close(b, a, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(
    "precision, offload",
    [
        *(
            (name, False)
            for name in ("fp32", "fp16", "bf16", "memory_efficient_fp16", "memory_efficient_bf16")
        ),
        *((name, True) for name in ("fp32", "fp16", "bf16")),
    ],
)
def test_clipping_does_not_use_a_gpu_if_gradients_are_in_host_memory(precision, offload, monkeypatch):
    """This happens with --cpu on a machine with a GPU, to which fairseq moves the norm."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("a GPU was used"))
    half = precision.removeprefix("memory_efficient_")
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[half]
    flags = {} if half == "fp32" else {precision: True, half: True, "fp16_no_flatten_grads": True}
    root = root_of(offload=offload, **flags)
    parameters = parameters_of(dtype)
    if half == "fp32":
        optimizer = optim.build_optimizer(root.optimizer, parameters)
    else:
        build = half_optimizer if half == precision else MemoryEfficientFP16Optimizer.build_optimizer
        optimizer = build(root, parameters)
    assert float(update(optimizer, parameters, 0)) > 0.5  # clipped


@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_clipping_on_a_cpu_has_the_same_bits_as_fairseq(count):
    generator = torch.Generator().manual_seed(count)
    sets = [[torch.nn.Parameter(torch.zeros(7, 11 + i)) for i in range(count + 1)] for _ in range(2)]
    for a, b in zip(*(parameters[:count] for parameters in sets), strict=True):  # the last has no gradient
        a.grad = torch.randn(a.shape, generator=generator)
        b.grad = a.grad.clone()
    norm = optim.build_optimizer(root_of().optimizer, sets[0]).clip_grad_norm(0.5)
    assert torch.equal(norm, utils.clip_grad_norm_(sets[1], 0.5))
    for a, b in zip(*(parameters[:count] for parameters in sets), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_an_overflow_skips_the_step_and_lowers_the_scale():
    parameters = parameters_of(torch.float16)
    root = root_of(offload=True, fp16=True, fp16_no_flatten_grads=True, fp16_init_scale=2**10)
    optimizer = half_optimizer(root, parameters)
    with pytest.raises(OverflowError, match="setting loss scale to: 512"):
        update(optimizer, parameters, 0, size=1e4)
    optimizer.zero_grad()
    for before, after in zip(parameters_of(torch.float16), parameters, strict=True):
        assert torch.equal(before, after)
    update(optimizer, parameters, 0)
    assert not torch.equal(parameters[0], parameters_of(torch.float16)[0])


def task(stage=0, offload=False):
    return argparse.Namespace(moe_zero_stage=stage, moe_offload_optimizer=offload)


def test_one_rank_and_a_model_without_experts_have_no_shards(monkeypatch):
    assert zero_options(task(2)) is None
    assert zero_options(task(2, offload=True)) == ZeroOptions(0, True)
    monkeypatch.setattr(RUN, "topology", Topology(world_size=2))
    assert zero_options(task(2, offload=True)) is None


def test_a_backward_with_fp16_finishes_the_reduction_of_gradients(monkeypatch):
    parameters, ended = parameters_of(torch.float16), []
    root = root_of(offload=True, fp16=True, fp16_no_flatten_grads=True)
    optimizer = half_optimizer(root, parameters)
    shards = optimizer.wrapped_optimizer.zero
    monkeypatch.setattr(shards.reducer, "finish_backward", lambda: ended.append(parameters[0].grad))
    optimizer.backward(parameters[0].float().sum())
    assert len(ended) == 1 and ended[0] is not None
