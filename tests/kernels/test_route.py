"""Compares the fused softmax and top-k choice, in plain torch and in Triton, with brute force."""

import pytest
import torch
from cases import DTYPES, TOLERANCE, name_of
from route_cases import LOGITS, best_first, choices, logits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_tutel import MoEConfig, MoELayer, kernels
from fairseq_tutel.kernels import reference
from fairseq_tutel.moe.choice import softmax_top_k
from fairseq_tutel.moe.dispatch import combine, dispatch
from fairseq_tutel.moe.routing import decide, padded
from fairseq_tutel.moe.slots import Capacity, MicroBatch


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def compare_softmax_top_k(backend: str, shape: tuple[int, int], dtype: torch.dtype, device: str):
    ops = kernels.ops(backend, torch.device(device))
    logits_TE = logits(*shape, dtype).to(device)
    for top_k in choices(shape[1]):
        probs_TE, ids_TK, weights_TK = ops.softmax_top_k(logits_TE, top_k)
        assert probs_TE.dtype == weights_TK.dtype == dtype and ids_TK.dtype == torch.int64
        close(probs_TE, torch.softmax(logits_TE, dim=1))
        assert ids_TK.tolist() == best_first(probs_TE, top_k)
        assert torch.equal(weights_TK, probs_TE.gather(1, ids_TK))
        if top_k <= 5:
            *same, normalized_TK = ops.softmax_top_k(logits_TE, top_k, True)
            assert torch.equal(same[0], probs_TE) and torch.equal(same[1], ids_TK)
            close(normalized_TK, (weights_TK / weights_TK.sum(dim=1, keepdim=True)).to(dtype))
        # After rounding, a larger logit may give an equal probability, but never a smaller probability.
        assert not logits_TE.gather(1, ids_TK).diff(dim=1).gt(0).any()


def compare_strange_logits(backend: str, device: str):
    inf, nan = float("inf"), float("nan")
    logits_TE = torch.tensor(
        [[1, nan, 3], [inf, 0, 0], [0, -inf, 1], [-inf] * 3, [nan] * 3, [-inf, -inf, 5], [1e30] * 3]
    )
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        given = logits_TE.to(device, dtype)
        probs_TE, ids_TK, weights_TK = kernels.ops(backend, given.device).softmax_top_k(given, 3)
        close(probs_TE, torch.softmax(given, dim=1))
        first = [0, 1, 2]
        assert ids_TK.tolist() == [first, first, [2, 0, 1], first, first, [2, 0, 1], first]
        close(weights_TK, probs_TE.gather(1, ids_TK))


def compare_backward_gradients(backend: str, dtype: torch.dtype, device: str):
    ops = kernels.ops(backend, torch.device(device))
    for shape in ((0, 3), (1, 1), (63, 5), (63, 100)):
        logits_TE = logits(*shape, torch.float64).to(device, dtype)
        for top_k in {1, min(2, shape[1]), min(5, shape[1])}:
            probs_TE, ids_TK, weights_TK = reference.softmax_top_k(logits_TE, top_k)
            generator = torch.Generator().manual_seed(top_k)
            dprobs, dweights = (
                torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
                for like in (probs_TE, weights_TK)
            )
            # A balance loss gives all tokens the same gradient row, as a tensor with stride 0.
            for given in (
                (dprobs, dweights, False),
                (None, dweights, False),
                (dprobs.t().contiguous().t(), None, False),
                (dprobs[:1].expand_as(dprobs), dweights, True),
                (None, dweights, True),
            ):
                got = ops.softmax_top_k_backward(probs_TE, ids_TK, *given)
                close(got, expected_gradient(probs_TE, ids_TK, *given))
                weight_ED = torch.rand(700, shape[1], device=device).bfloat16().t()
                if backend == "reference":
                    continue
                pair_TF, twice_FD = ops.gate_backward(probs_TE.detach(), ids_TK, *given, weight_ED)
                sum_TE = pair_TF.double().unflatten(1, (2, -1)).sum(1)
                rtol = max(2**-15, torch.finfo(got.dtype).eps)  # `got` may have only 8 bits of precision
                torch.testing.assert_close(sum_TE, got.double(), rtol=rtol, atol=1e-6)
                assert torch.equal(twice_FD, torch.cat((weight_ED, weight_ED)))


def expected_gradient(probs_TE: Tensor, ids_TK: Tensor, dprobs, dweights, normalize: bool) -> Tensor:
    """Return the gradient of the logits, computed by autograd in fp64."""
    p = probs_TE.double().requires_grad_()
    weights_TK = p.gather(1, ids_TK)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
    loss = (p * (0 if dprobs is None else dprobs.double())).sum()
    loss = loss + (weights_TK * (0 if dweights is None else dweights.double())).sum()
    (dp,) = torch.autograd.grad(loss, p)
    return (p * (dp - (p * dp).sum(1, keepdim=True))).detach().to(probs_TE.dtype)


def compare_node_gradients(backend: str):
    """Compare gradients of softmax_top_k with finite differences, and those of one output with autograd."""
    ops = kernels.ops(backend, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for num_tokens, num_experts, top_k in ((3, 5, 2), (2, 3, 3), (2, 1, 1)):
        x_TE = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
        x_TE.requires_grad_()
        assert torch.autograd.gradcheck(lambda x, k=top_k: softmax_top_k(x, k, ops)[::2], x_TE)
        probs_TE, _, weights_TK = softmax_top_k(x_TE, top_k, ops)
        for used in (probs_TE, weights_TK):
            (grad,) = torch.autograd.grad(used.square().sum(), x_TE, retain_graph=True)
            plain = torch.softmax(x_TE, 1)
            plain = plain if used is probs_TE else plain.topk(top_k).values
            (expected,) = torch.autograd.grad(plain.square().sum(), x_TE)
            close(grad, expected)


LAYER = {"model_dim": 6, "hidden_dim": 5, "num_experts": 5, "top_k": 2}
LAYERS = (
    {"capacity_factor": 0.5, "balance_loss": "gshard:1,z:0.1"},
    {"capacity_factor": 0.5, "drop_policy": "probability", "normalize_gate": "after"},
    {"capacity_factor": -0.5, "drop_policy": "bpr"},
    {"expert_groups": 5, "groups_per_token": 3, "drop_policy": "rts", "capacity_factor": 0.5},
    {"balance_bias": True, "score_function": "sigmoid"},
)


def run_layer(backend: str, options: dict, device: str) -> dict[str, Tensor]:
    layer = MoELayer(MoEConfig(**LAYER, backend=backend, **options), seed=1).to(device).double()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, 5, 6, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    padding_mask = (torch.arange(35, device=device) % 6 == 4).view(5, 7)
    torch.manual_seed(3)
    y, output = layer(x, padding_mask, time_first=True)
    (y.square().sum() + output.balance_loss).backward()
    decided = output.routing
    found = {"y": y.detach(), "dx": x.grad, "slots": decided.slots_TK, "rows": decided.row_of_TK}
    found |= {"counts": decided.counts_E, "dropped": decided.dropped_K}
    return found | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def compare_layer_gradients(options: dict, device: str):
    ours = run_layer("triton", options, device)
    plain = run_layer("reference", options, device)
    assert ours.keys() == plain.keys()
    for name, expected in plain.items():
        if expected.is_floating_point():
            torch.testing.assert_close(ours[name], expected, rtol=1e-10, atol=1e-12, msg=name)
        elif name != "rows":  # on a GPU, the compact layout has unused rows at the end
            assert torch.equal(ours[name], expected), name


FUSED = MoEConfig(1, 1, 4, backend="triton", drop_policy="bpr")


def walk(logits_TE: Tensor, x_TD: Tensor) -> Tensor:
    """Route, dispatch and combine in the padded layout, whose size does not depend on the row counts."""
    batch = MicroBatch(top_k=2, capacity=Capacity(factor=0.5), time_first=(3, len(x_TD) // 3))
    decided = padded(decide(logits_TE, FUSED, batch), 9)
    rows_RD = dispatch(x_TD, decided, "triton") * 2
    return combine(rows_RD, decided, "triton").square().sum() + decided.probs_TE.square().sum()


def compare_compiled_gradients(device: str):
    """Compare eager outputs and gradients with those of a compiled graph that calls the kernels."""
    if device == "cpu":  # Dynamo cannot trace the check of whether Triton interprets its kernels
        kernels.interpreted = lambda: True
    generator = torch.Generator().manual_seed(0)
    compiled = torch.compile(walk, backend="aot_eager", fullgraph=True)
    for num_tokens in (9, 12):  # for the second number, torch compiles a graph for any number of tokens
        given = [torch.randn(num_tokens, d, generator=generator, dtype=torch.float64) for d in (4, 3)]
        results = []
        for forward in (walk, compiled):
            leaves = [tensor.to(device).requires_grad_() for tensor in given]
            loss = forward(*leaves)
            results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
        for expected, got in zip(*results, strict=True):
            close(got, expected)


def fake_results(time_first: tuple[int, int] | None) -> list[tuple]:
    """Call every op on fake tensors, which have no data; a host read of such a tensor raises an error."""
    from fairseq_tutel.kernels import triton_tiles

    ops = kernels.ops("triton", torch.device("cuda"))
    with FakeTensorMode():
        x = torch.empty(6, 5, device="cuda", dtype=torch.bfloat16)
        rows = torch.empty(12, device="cuda", dtype=torch.int64)
        ids, narrow = rows.view(6, 2), torch.empty(6, 2, device="cuda", dtype=torch.bfloat16)
        asked = torch.empty(6, 2, device="cuda", dtype=torch.bool)
        limit = torch.empty((), device="cuda", dtype=torch.int64)
        found = [
            *ops.softmax_top_k(x, 2),
            *ops.softmax_top_k(x, 2, True),
            ops.softmax_top_k_backward(x, ids, None, narrow, True),
            *ops.assign_rows(ids, 5, None, None, time_first),
            *ops.assign_rows(ids, 5, asked, rows, None, limit),
            ops.token_sums(x, narrow, None),
            ops.gather_rows(x, rows),
            ops.gather_rows(x, rows, narrow.view(12)),
            *ops.gather_pair(x, x, rows),
            ops.gather_sum(x, rows.view(6, 2)),
            *ops.gather_gradients(x, rows.view(6, 2), x.t()),
            ops.gather_dot(x, rows.view(6, 2), x),
            triton_tiles.row_tiles(rows, 100),
        ]
    assert all(f.device.type == "cuda" for f in found)
    return [(tuple(f.shape), str(f.dtype).removeprefix("torch.")) for f in found]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", LOGITS, ids=str)
def test_softmax_top_k_chooses_as_brute_force_does(shape, dtype):
    compare_softmax_top_k("reference", shape, dtype, "cpu")


@pytest.mark.parametrize("autocast", (False, True))
def test_torch_2_11_traces_the_choice_of_experts_as_one_graph(autocast, monkeypatch):
    untraceable = torch.compiler.disable(torch.amp.is_autocast_available)
    monkeypatch.setattr(torch.amp, "is_autocast_available", untraceable)

    def choose(logits_TE: Tensor) -> Tensor:
        probs_TE, _, weights_TK = softmax_top_k(logits_TE, 2, reference)
        return probs_TE.square().sum() + weights_TK.square().sum()

    logits_TE = logits(9, 4, torch.bfloat16).requires_grad_()
    results = []
    for forward in (choose, torch.compile(choose, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", enabled=autocast):
            loss = forward(logits_TE)
        results.append((loss.detach(), *torch.autograd.grad(loss, logits_TE)))
    assert results[0][0].dtype == (torch.float32 if autocast else torch.bfloat16)
    for expected, got in zip(*results, strict=True):
        close(got, expected)


def test_nan_and_infinite_logits_give_valid_ids():
    compare_strange_logits("reference", "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_reference_gradients_equal_autograd(dtype):
    compare_backward_gradients("reference", dtype, "cpu")


def test_reference_gradients_equal_finite_differences():
    compare_node_gradients("reference")


triton = pytest.mark.usefixtures("_triton")
# Tests in Triton's interpreter use every dtype for these shapes, and only fp32 for other shapes. `make
# test-long` uses every dtype for all shapes.
EVERY_TYPE = ((1, 8), (63, 5))


@pytest.fixture
def _triton():
    pytest.importorskip("triton")


@triton
@pytest.mark.parametrize(
    "shape, dtype",
    [
        pytest.param(
            shape, dtype, marks=[pytest.mark.long] * (dtype != torch.float32 and shape not in EVERY_TYPE)
        )
        for i, shape in enumerate(LOGITS)
        for dtype in DTYPES
    ],
    ids=lambda value: name_of(value) if isinstance(value, torch.dtype) else str(value),
)
def test_interpreted_softmax_top_k_chooses_as_brute_force_does(interpreter, shape, dtype):
    interpreter.run(compare_softmax_top_k, "triton", shape, dtype, "cpu")


@triton
def test_softmax_top_k_supports_more_experts_than_a_tile_has_elements(interpreter):
    interpreter.run(compare_softmax_top_k, "triton", (2, 1100), torch.float32, "cpu")


@triton
def test_interpreted_nan_and_infinite_logits_give_valid_ids(interpreter):
    interpreter.run(compare_strange_logits, "triton", "cpu")


@triton
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.long), torch.float64], ids=name_of
)
def test_interpreted_gradients_equal_autograd(interpreter, dtype):
    interpreter.run(compare_backward_gradients, "triton", dtype, "cpu")


@triton
def test_interpreted_gradients_equal_finite_differences(interpreter):
    interpreter.run(compare_node_gradients, "triton")


@triton
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_an_interpreted_layer_has_the_routing_and_gradients_of_the_reference(interpreter, options):
    interpreter.run(compare_layer_gradients, options, "cpu")


@triton
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_interpreted_kernels_in_one_compiled_graph_give_the_gradients_of_eager_mode(interpreter):
    interpreter.run(compare_compiled_gradients, "cpu")


@triton
@pytest.mark.parametrize("time_first", (None, (2, 3)))
def test_ops_on_fake_tensors_return_shapes_without_a_launch(time_first):
    gate = [((6, 5), "bfloat16"), ((6, 2), "int64"), ((6, 2), "bfloat16")]
    rows = [((6, 2), "int64"), ((2, 5), "int64"), ((5,), "int64"), ((2,), "int64"), ((6, 2), "int64"),
            ((12,), "int64"), ((12,), "int64"), ((96,), "int64")]  # fmt: skip
    # Each table of row tiles, for tiles of 16 to 256 rows, has three numbers for each tile.
    tiles = 13 + 3 * sum(100 // size + 13 for size in (16, 32, 64, 128, 256))
    assert fake_results(time_first) == [
        *gate,
        *gate,
        ((6, 5), "bfloat16"),
        *rows,
        *rows,
        ((8,), "float32"),
        *[((12, 5), "bfloat16")] * 4,
        ((6, 5), "bfloat16"),
        ((6, 5), "bfloat16"),
        ((6, 2), "bfloat16"),
        ((6, 2), "bfloat16"),
        ((tiles,), "int64"),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_compiled_softmax_top_k_and_gradients_equal_brute_force(dtype):
    for shape in (*LOGITS, (5, 1024)):
        compare_softmax_top_k("triton", shape, dtype, "cuda")
    compare_backward_gradients("triton", dtype, "cuda")


@pytest.mark.gpu
def test_compiled_nan_and_infinite_logits_give_valid_ids():
    compare_strange_logits("triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_a_compiled_layer_has_the_routing_and_gradients_of_the_reference(options):
    compare_layer_gradients(options, "cuda")


@pytest.mark.gpu
def test_kernels_in_one_compiled_graph_give_the_gradients_of_eager_mode():
    compare_compiled_gradients("cuda")
