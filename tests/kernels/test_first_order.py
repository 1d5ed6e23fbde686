"""Double backward raises an error in every custom backward function."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.kernels import reference
from fairseq_tutel.moe.choice import softmax_top_k
from fairseq_tutel.plugin.criterions.token_loss import token_loss

PACKAGE = Path(__file__).parents[2] / "fairseq_tutel"
MESSAGE = "supports only first derivatives"


def tokens(requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    return x.requires_grad_(requires_grad)


@pytest.mark.parametrize("wanted", ("x", "parameters"))
@pytest.mark.parametrize(
    "options",
    (
        {},
        {"expert_type": "glu", "recompute_experts": True},
        {"hidden_layer_norm": True},
        {"hidden_layer_norm": True, "prescore": True},
        {"expert_type": "custom_parts.DeepExpert"},
    ),
    ids=str,
)
def test_a_second_derivative_raises_an_error_and_the_first_derivative_is_correct(options, wanted):
    layer = MoELayer(MoEConfig(6, 8, 4, activation="gelu", **options), seed=1).double()
    x = tokens()
    inputs = [x] if wanted == "x" else [p for p in layer.parameters() if p.requires_grad]
    # The gradient of the sum with respect to y is constant, but the layer's second derivative is not 0.
    expected = torch.autograd.grad(layer(x)[0].sum(), inputs)
    for forward in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        grads = torch.autograd.grad(forward(x)[0].sum(), inputs, create_graph=True)
        for grad, value in zip(grads, expected, strict=True):
            assert torch.equal(grad, value)
        for grad in grads:
            with pytest.raises(RuntimeError, match=MESSAGE):
                torch.autograd.grad(grad.square().sum(), inputs, retain_graph=True)
        with pytest.raises(RuntimeError, match=MESSAGE):
            sum(grad.square().sum() for grad in grads).backward()


@pytest.mark.parametrize(
    "function",
    (
        lambda logits: token_loss(logits, torch.arange(5), 0.1, -1)[0],
        lambda logits: softmax_top_k(logits, 2, reference)[0].select(1, 0).sum(),
    ),
    ids=("token_loss", "fused_gate"),
)
def test_a_second_derivative_of_token_loss_or_softmax_top_k_raises_an_error(function):
    logits = tokens()
    (grad,) = torch.autograd.grad(function(logits), logits, create_graph=True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.autograd.grad(grad.square().sum(), logits)


def hand_written(tree: ast.AST) -> list[ast.FunctionDef]:
    return [
        item
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base) == "torch.autograd.Function" for base in node.bases)
        for item in node.body
        if isinstance(item, ast.FunctionDef) and item.name == "backward"
    ]


def test_every_custom_backward_function_has_the_decorator_against_double_backward():
    """Only a backward that runs another autograd function lacks the decorator against double backward."""
    marked = []
    for path in (*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")):
        if path.name == "first_order.py":
            continue
        for backward in hand_written(ast.parse(path.read_text())):
            if re.fullmatch(r"return \(_\w+\.apply\(.*\)", ast.unparse(backward.body)):
                continue
            decorators = [ast.unparse(d) for d in backward.decorator_list]
            assert decorators == ["staticmethod", "first_order"], path
            marked.append(path.name)
    assert {"expert_ffn.py", "dispatch.py", "all_to_all.py", "feed_forward.py"} <= set(marked)
