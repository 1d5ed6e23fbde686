"""`python -m benchmarks.generate`: incremental decoding of MoE and dense models.

Greedy decoding with cached keys and values, one token of each sentence in a step. Times are of a whole
text; the first token of each sentence is given. On a CPU `products alone` is the MoE model whose MoE layers
only multiply: the same number of rows with the weights of the same experts as in the previous text, all
known beforehand. Its output is meaningless. "read" is the mean of the bytes of weights that a step reads,
without those of experts that got no rows.
"""

import argparse
import copy
import itertools
import sys
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from benchmarks import command, timing
from benchmarks.bad_option import BadOption
from benchmarks.fairseq_models import SHAPES, SPECIAL, build, words_of
from benchmarks.layer_check import TOLERANCES, relative_errors
from benchmarks.machine import device_of, facts
from benchmarks.output import Report, Row
from fairseq_tutel.kernels.few_rows import ffn_of_few
from fairseq_tutel.moe.call import Call
from fairseq_tutel.moe.experts import Experts
from fairseq_tutel.moe.routing import Routing
from fairseq_tutel.plugin.feed_forward import MoEFeedForward

BASE, ALONE = "dense", "products alone"
ROUNDS, QUICK_ROUNDS = 9, 2
BATCHES, TOKENS, QUICK_TOKENS = (1, 8, 32), 64, 6


def main(words: list[str] | None = None) -> int:
    """Measure; return 1 where decoding step by step differs from a forward of the whole, else 0."""
    parser = command.parser_of("generate", "Time incremental decoding of a model with experts.")
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where, in float32")
    add("--top-k", type=int, default=1, help="experts of a token")
    add("--batches", type=int, nargs="+", default=list(BATCHES), help="sentences at a time")
    add("--tokens", type=int, default=TOKENS, help="of a sentence")
    add("--threads", type=int, default=1, help="on CPU")
    add("--rounds", type=int, default=ROUNDS, help="timed texts of each")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    for flag in ("top_k", "tokens", "threads", "rounds"):
        if getattr(options, flag) < 1:
            label = flag.replace("_", "-")
            raise BadOption(f"--{label} is {getattr(options, flag)}; give at least 1.")
    device = device_of(options.device)
    torch.set_num_threads(options.threads)
    shape = SHAPES["moe_transformer_lm_gpt"]
    shape = shape.tiny() if options.quick else shape
    tokens = QUICK_TOKENS if options.quick else options.tokens
    shape = replace(shape, top_k=options.top_k, tokens=tokens)
    models = {
        name: build(shape, words_of(shape, moe=name == "moe"), device).model.to(device).eval()
        for name in (BASE, "moe")
    }
    machine = facts(device, torch.float32)
    report = Report("generate", BASE, machine, command.shown(options), options.json)
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    for batch in options.batches:
        first_B = torch.arange(SPECIAL, SPECIAL + batch, device=device) % shape.words
        rows = measured(models, first_B, tokens, rounds)
        about = {**asdict(shape), "sentences": batch, "dense_ffn_dim": shape.dense_ffn_dim}
        report.add(f"batch {batch}", about, rows)
    report.finish(options.plot)
    return int(any(row["status"] != "ok" for row in report.rows))


def measured(models: dict[str, nn.Module], first_B: Tensor, tokens: int, rounds: int) -> list[Row]:
    """Check and time all models.

    Args:
        models: language models in evaluation by name.
        first_B: [B] int64, the first token of every sentence.
        tokens: of a sentence, the first included.
        rounds: timed.
    """
    rows: dict[str, Row] = {}
    for name, model in models.items():
        rows[name] = {"variant": name, "status": "ok", **checked(model, first_B, tokens)}
    if first_B.device.type == "cpu":
        bytes_read, known = watched(models["moe"], first_B, tokens)
        models = {**models, ALONE: products_alone(models["moe"], known)}
        rows[ALONE] = {"variant": ALONE, "status": "ok", "read_bytes": bytes_read}
        rows["moe"]["read_bytes"] = bytes_read
        rows[BASE]["read_bytes"] = sum(map(_bytes, models[BASE].parameters()))
    steps: dict[str, timing.Step] = {
        name: lambda model=model: decode(model, first_B, tokens)
        for name, model in models.items()
        if rows[name]["status"] == "ok"
    }
    took = timing.interleaved(steps, rounds, first_B.device)
    for name, summary in timing.against(took, BASE).items():
        rate = len(first_B) * tokens / summary["seconds"]
        rows[name] |= {**summary, "rate": rate, "rate_unit": "tokens/s"}
    if {ALONE, "moe"} <= took.keys():
        over = timing.against(took, ALONE)["moe"]["ratio"]
        rows["moe"] |= {"over_products": over, "note": f"{over:.3f} of {ALONE}"}
    return list(rows.values())


@torch.no_grad()
def decode(model: nn.Module, first_B: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return (text [B, tokens], logits of the next token [B, words])."""
    state: dict[str, dict[str, Tensor | None]] = {}
    text_BT = first_B.unsqueeze(1)
    for number in range(tokens):
        logits_BV = model(text_BT, incremental_state=state)[0][:, -1]
        if number + 1 < tokens:
            text_BT = torch.cat([text_BT, logits_BV.argmax(dim=1, keepdim=True)], dim=1)
    return text_BT, logits_BV


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the stock layers whose FFN step is a MoE layer, in order."""
    return [layer for layer in model.modules() if isinstance(getattr(layer, "fc1", None), MoEFeedForward)]


def watched(model: nn.Module, first_B: Tensor, tokens: int) -> tuple[float, list[list[dict[int, int]]]]:
    """Decode a text; return the bytes of weights that a step reads, and each layer's rows by expert.

    Returns:
        The mean number of bytes; for every layer, step by step, the rows of each expert that has any.
    """
    layers = [layer.fc1 for layer in layers_of(model)]
    known: list[list[dict[int, int]]] = [[] for _ in layers]
    for layer, steps in zip(layers, known, strict=True):
        layer.route_by(_Watch(steps))
    decode(model, first_B, tokens)
    for layer in layers:
        layer.route_by(None)
    stacks = [layer.experts.expert_parameters().values() for layer in layers]
    held = [sum(map(_bytes, stack)) for stack in stacks]
    read = sum(map(_bytes, model.parameters())) - sum(held)
    for layer, size, steps in zip(layers, held, known, strict=True):
        read += size / layer.config.num_experts * sum(map(len, steps)) / len(steps)
    return read, known


class _Watch:
    """Notes how many rows each expert of a layer gets."""

    def __init__(self, steps: list[dict[int, int]]) -> None:
        self.steps = steps

    def routing_of(self, layer: MoEFeedForward, x_TD: Tensor, call: Call) -> Routing:
        routing = layer.route(x_TD, call)
        counts = routing.groups.host
        self.steps.append({expert: count for expert, count in enumerate(counts) if count})
        return routing


class _Products(nn.Module):
    """A MoE layer that only multiplies, by the experts with rows of one step after the other."""

    def __init__(self, experts: Experts, steps: list[dict[int, int]]) -> None:
        super().__init__()
        stacks = [getattr(experts, name).unbind() for name in experts.names]
        self.weights = [dict(zip(experts.names, own, strict=True)) for own in zip(*stacks, strict=True)]
        self.activation = experts.config.activation
        self.steps = itertools.cycle(steps)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.view(-1, x.shape[-1])
        for expert, count in next(self.steps).items():
            y_nD = ffn_of_few(x_TD[:count], self.weights[expert], self.activation)
        return y_nD[:1].expand_as(x_TD).view(x.shape)


def products_alone(model: nn.Module, known: list[list[dict[int, int]]]) -> nn.Module:
    """Return a copy of a model, without hooks, that shares its weights; see the head of this file."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    model = copy.deepcopy(model, shared)
    model._forward_pre_hooks.clear()
    for layer, steps in zip(layers_of(model), known, strict=True):
        layer._forward_pre_hooks.clear()
        layer.fc1 = _Products(layer.fc1.experts, steps)
    return model


def _bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


@torch.no_grad()
def checked(model: nn.Module, first_B: Tensor, tokens: int) -> Row:
    """Compare the last step's logits with those of the whole text at once."""
    text_BT, logits_BV = decode(model, first_B, tokens)
    whole_BV = model(text_BT)[0][:, -1]
    (error,) = relative_errors({"y": logits_BV}, {"y": whole_BV}).values()
    if error <= TOLERANCES[torch.float32]:
        return {"error": error}
    reason = f"its last logits differ from those of the whole text by {error:.1e}"
    return {"status": "wrong", "reason": reason}


if __name__ == "__main__":
    sys.exit(main())
