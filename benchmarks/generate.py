"""`python -m benchmarks.generate`: time incremental decoding with MoE and dense models.

Decoding is greedy, with cached keys and values, and one token of each sentence per step. The first token of
each sentence is given. Each measured time is that of all steps.
"""

import argparse
import sys
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from benchmarks import command, timing
from benchmarks.fairseq_models import SHAPES, SPECIAL, build, words_of
from benchmarks.layer_check import TOLERANCES, relative_errors
from benchmarks.machine import device_of, facts
from benchmarks.output import Report, Row

BASE = "dense"
ROUNDS, QUICK_ROUNDS = 9, 2
BATCHES, TOKENS, QUICK_TOKENS = (1, 8, 32), 64, 6


def main(words: list[str] | None = None) -> int:
    """Measure; return 1 if stepwise decoding differs from one forward over the complete text, else 0."""
    parser = command.parser_of("generate", "Time incremental decoding of a model with experts.")
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where, in float32")
    add("--top-k", type=command.positive, default=1, help="experts of a token")
    add("--batches", type=command.positive, nargs="+", default=list(BATCHES), help="sentences at a time")
    add("--tokens", type=command.positive, default=TOKENS, help="of a sentence")
    add("--threads", type=command.positive, default=1, help="on CPU")
    add("--rounds", type=command.positive, default=ROUNDS, help="timed texts of each")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
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
    report.finish()
    return int(any(row["status"] != "ok" for row in report.rows))


def measured(models: dict[str, nn.Module], first_B: Tensor, tokens: int, rounds: int) -> list[Row]:
    """Check and time all models.

    Args:
        models: dictionary from names to language models in evaluation mode.
        first_B: [B] int64, the first token of every sentence.
        tokens: number of tokens per sentence, including the first.
        rounds: number of timed rounds.
    """
    rows: dict[str, Row] = {}
    for name, model in models.items():
        rows[name] = {"variant": name, "status": "ok", **checked(model, first_B, tokens)}
    steps: dict[str, timing.Step] = {
        name: lambda model=model: decode(model, first_B, tokens)
        for name, model in models.items()
        if rows[name]["status"] == "ok"
    }
    took = timing.interleaved(steps, rounds, first_B.device)
    for name, summary in timing.against(took, BASE).items():
        rate = len(first_B) * tokens / summary["seconds"]
        rows[name] |= {**summary, "rate": rate, "rate_unit": "tokens/s"}
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


@torch.no_grad()
def checked(model: nn.Module, first_B: Tensor, tokens: int) -> Row:
    """Compare the last step's logits with those of one forward over the complete text."""
    text_BT, logits_BV = decode(model, first_B, tokens)
    whole_BV = model(text_BT)[0][:, -1]
    (error,) = relative_errors({"y": logits_BV}, {"y": whole_BV}).values()
    if error <= TOLERANCES[torch.float32]:
        return {"error": error}
    reason = f"its last logits differ from those of the whole text by {error:.1e}"
    return {"status": "wrong", "reason": reason}


if __name__ == "__main__":
    sys.exit(main())
