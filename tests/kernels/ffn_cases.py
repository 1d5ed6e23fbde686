"""The experts' FFN, computed by the grouped ops under test (`run`) and in fp64 (`oracle`).

`run` calls the ops in the order of a layer: fc1, fc2 and both backward passes. The ops gather the tokens.
`oracle` loops over the experts in fp64, without groups or gathers, and uses autograd.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel.kernels.groups import Groups

# The largest allowed error relative to the largest entry in fp64. Half precision rounds more often.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Case:
    """The sizes and options of one test of the FFN.

    Attributes:
        counts: the number of rows of each expert.
        tail: the number of rows after the last group, which have no expert.
        model_dim: D.
        hidden_dim: H.
        dtype: the dtype of rows and weights; gates are at least fp32.
        activation: a name in ACTIVATIONS.
        glu: whether there is fc3.
        bias: whether the linear maps have biases.
        gathered: whether rows are gathered from tokens; there are 2/3 as many tokens as rows.
        gated: whether gathered rows have gate weights.
        keep: whether backward gets the activation's output a; otherwise, backward recomputes a.
        strided: whether weights are stored transposed.
    """

    counts: tuple[int, ...]
    tail: int = 3
    model_dim: int = 17
    hidden_dim: int = 33
    dtype: torch.dtype = torch.float32
    activation: str = "relu"
    glu: bool = False
    bias: bool = True
    gathered: bool = True
    gated: bool = True
    keep: bool = True
    strided: bool = False

    def __str__(self) -> str:
        plain = Case(self.counts)
        given = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return "-".join([f"rows={sum(self.counts)}", f"experts={len(self.counts)}", *given])


def inputs(case: Case, device: str) -> dict[str, Any]:
    """Draw x, dy, weights and index maps. Values that no op may read are NaN, or -1 in a map."""
    generator = torch.Generator().manual_seed(len(case.counts) + 10 * sum(case.counts))
    experts, used = len(case.counts), sum(case.counts)
    rows = used + case.tail
    sources = (used * 2 // 3 + 1) if case.gathered else rows
    hidden, model, dtype = case.hidden_dim, case.model_dim, case.dtype

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
        return drawn.to(dtype).to(device)

    def weight(out: int, into: int) -> Tensor:
        drawn = normal(experts, out, into, scale=into**-0.5)
        return drawn.mT.contiguous().mT if case.strided else drawn

    given: dict[str, Any] = {
        "counts": torch.tensor(case.counts, device=device),
        "x": normal(sources, model),
        "dy": normal(sources, model),
        "fc1": weight(hidden, model),
        "fc2": weight(model, hidden),
        "fc3": weight(hidden, model) if case.glu else None,
        "fc1_bias": normal(experts, hidden) if case.bias else None,
        "fc2_bias": normal(experts, model) if case.bias else None,
        "fc3_bias": normal(experts, hidden) if case.bias and case.glu else None,
        "index": None,
        "gate": None,
        "values": None,
        "source": None,
    }
    if case.gathered:
        index = torch.randint(0, sources, (rows,), generator=generator)
        index[used:] = -1
        gate = torch.rand(rows, generator=generator, dtype=torch.float64)
        gate[used:] = float("nan")
        wide = torch.promote_types(dtype, torch.float32)
        given["index"] = index.to(device)
        if case.gated:
            given["gate"] = gate.to(wide).to(device)
            source = torch.randperm(used, generator=generator)
            given["values"] = gate[source.argsort()].to(wide).to(device)
            given["source"] = F.pad(source, (0, case.tail), value=-1).to(device)
    else:
        given["x"][used:] = float("nan")
        given["dy"][used:] = float("nan")
    return given


def run(ops: Any, case: Case, given: dict[str, Any]) -> dict[str, Tensor]:
    """Run the FFN ops and return every result by name, without the undefined rows at the end."""
    groups, used = Groups.of_tensor(given["counts"]), sum(case.counts)
    index, fc1, fc2, fc3 = (given[k] for k in ("index", "fc1", "fc2", "fc3"))
    gate, source = given["values"], given["source"]
    a, h, g = ops.ffn_up(
        given["x"], index, fc1, given["fc1_bias"], fc3, given["fc3_bias"], groups, case.activation, True
    )
    out = ops.grouped_linear(a, fc2, given["fc2_bias"], groups)
    kept = a if case.keep or h is None else None
    x, dy = given["x"], given["dy"]
    if index is not None:
        x, dy = ops.gather_pair(x, dy, index)
    dh, dg, gated, dgate = ops.ffn_down_backward(
        dy, gate, source, fc2, given["fc2_bias"], kept, h, g, groups, case.activation
    )
    if gate is None:
        assert torch.equal(gated.narrow(0, 0, used), a.narrow(0, 0, used))
    results = {"a": a, "h": h, "g": g, "out": out, "dh": dh, "dg": dg}
    if dgate is not None:
        results["dgate"] = dgate.sum(0).narrow(0, 0, used)  # a fake CUDA tensor cannot be sliced
        results["gated"] = gated.narrow(0, 0, used)
    results["dfc2"], results["dfc2_bias"] = ops.grouped_weight_grad(
        dy, gated, groups, bias=case.bias, bias_scale_N=gate, bias_source_R=source
    )
    for name, d in (("fc1", dh), ("fc3", dg)):
        if d is not None:
            results[f"d{name}"], results[f"d{name}_bias"] = ops.grouped_weight_grad(
                d, x, groups, bias=case.bias
            )
    results["dx"] = ops.ffn_up_backward(dh, fc1, dg, fc3, groups)
    for name in ("h", "g"):  # the rows after the last group are undefined
        if results[name] is not None:
            results[name] = results[name].narrow(0, 0, used)
    return {name: tensor for name, tensor in results.items() if tensor is not None}


ACTS = {
    "relu": F.relu,
    "relu_squared": lambda h: F.relu(h) ** 2,
    "gelu": F.gelu,
    "gelu_fast": lambda h: F.gelu(h, approximate="tanh"),
    "gelu_accurate": lambda h: F.gelu(h, approximate="tanh"),
    "tanh": torch.tanh,
    "linear": lambda h: h,
    "swish": F.silu,
}


def oracle(case: Case, given: dict[str, Any]) -> dict[str, Tensor]:
    """Return the results of `run`, computed in fp64 on the CPU by a loop over experts with autograd."""
    used, rows = sum(case.counts), sum(case.counts) + case.tail
    leaf = {
        name: None if t is None else t.detach().cpu().double().nan_to_num().requires_grad_()
        for name, t in given.items()
        if name not in ("index", "dy", "counts", "values", "source")
    }
    index = torch.arange(rows) if given["index"] is None else given["index"].cpu()
    dy = given["dy"].cpu().double().nan_to_num()
    expert_of = torch.repeat_interleave(torch.tensor(case.counts))
    # This leaf tensor has one row per assignment, so two rows of one token have separate gradients.
    x = leaf["x"].detach()[index[:used]].requires_grad_()
    parts: dict[str, list[Tensor]] = {"h": [], "g": [], "a": [], "out": []}
    for e in range(len(case.counts)):
        x_e = x[expert_of == e]

        def linear(name: str, rows_e: Tensor, e: int = e) -> Tensor:
            bias = leaf[f"{name}_bias"]
            return F.linear(rows_e, leaf[name][e], None if bias is None else bias[e])

        h = linear("fc1", x_e)
        g = linear("fc3", x_e) if case.glu else None
        a = ACTS[case.activation](h) if g is None else F.silu(h) * g
        for name, value in (("h", h), ("g", g), ("a", a), ("out", linear("fc2", a))):
            if value is not None:
                parts[name].append(value)
    made = {name: torch.cat(values) for name, values in parts.items() if values}
    gate = torch.ones(used, dtype=torch.float64) if leaf["gate"] is None else leaf["gate"][:used]
    loss = (made["out"] * dy[index[:used]] * gate.unsqueeze(1)).sum()
    names = [n for n in leaf if n not in ("x", "gate") and leaf[n] is not None]
    wanted = {f"d{n}": [leaf[n]] for n in names} | {"dx": [x], "dh": parts["h"], "dg": parts["g"]}
    if leaf["gate"] is not None:
        wanted["dgate"] = [leaf["gate"]]
    results = made | {
        name: torch.cat(torch.autograd.grad(loss, tensors, retain_graph=True, materialize_grads=True))
        for name, tensors in wanted.items()
        if tensors
    }
    if "dgate" in results:
        results["dgate"] = results["dgate"][:used]
        results["gated"] = made["a"] * gate.unsqueeze(1)
    for name in ("a", "out", "dx", "dh", "dg"):  # their rows after the last group are 0
        if name in results:
            results[name] = F.pad(results[name], (0, 0, 0, case.tail))
    return {name: tensor.detach() for name, tensor in results.items()}


def check(got: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype, what: str) -> None:
    """Compare results by name, with errors relative to the largest entry of each tensor."""
    for name, tensor in got.items():
        want = expected[name].double().cpu()
        assert tensor.shape == want.shape, f"{name} of {what}: {tensor.shape} for {want.shape}"
        if want.numel() == 0:
            continue
        error = (tensor.double().cpu() - want).abs().max()
        allowed = TOLERANCE[dtype] * want.abs().max().clamp_min(1e-3)
        assert error <= allowed, f"{name} of {what}: off by {error:.3g}, allowed {allowed:.3g}"


def compare(ops: Any, plain: Any, case: Case, device: str) -> None:
    """Compare the results of two sets of ops with fp64 and with each other."""
    given = inputs(case, device)
    got, reference, exact = run(ops, case, given), run(plain, case, given), oracle(case, given)
    assert set(got) == set(reference)
    assert all(got[name].dtype == reference[name].dtype for name in got)
    check(reference, exact, case.dtype, f"the reference, {case}")
    check(got, exact, case.dtype, f"ours against fp64, {case}")
    check(got, reference, case.dtype, f"ours against the reference, {case}")


def skewed(num_rows: int, experts: int) -> tuple[int, ...]:
    """Return row counts: the second expert has half of the rows, and the last expert has none."""
    rest = num_rows - num_rows // 2
    others = [rest // (experts - 2)] * (experts - 2)
    others[0] += rest - sum(others)
    return (*others[:1], num_rows // 2, *others[1:], 0)


def with_tiles(case: Case) -> Case:
    """Return the test case with row sizes that are aligned for tensor descriptors."""
    return replace(case, model_dim=24, hidden_dim=40)
