"""The tool `tokens` draws an HTML page with the experts of each token of some sentences.

MODEL is a checkpoint or a --save-dir. DATA is the folder of the model's data set. Instead of DATA, --text
gives sentences. For each layer, the page shows the tokens in the colors of their experts. The page lists
the most typical tokens of each expert, and the load of the experts by language. For image classifiers, the
tokens are patches. One process can open any checkpoint, even if several ranks have saved the checkpoint.
"""

import argparse
import ast
import base64
import io
import json
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fairseq_tutel.tools.arguments import at_least, refuse_output, template_of, writing
from fairseq_tutel.tools.parser import add_output

# Number of sequences of tokens that the page shows. The statistics on the page include all sequences.
SHOWN = 40
LIMIT = "number of sentences (of each language pair) or images to read [500]"
OVERRIDES = (
    "options that replace those of the checkpoint, as in fairseq-generate, such as "
    "\"{'moe_expert_store': 'on-demand'}\" for a model that does not fit in memory [{}]"
)
STATISTICS = (
    "also write how often and with which probability the gates chose each expert, per language pair, to "
    "this JSON file, which convert prune reads"
)


def add_to(tools: Any) -> None:
    """Add the tool `tokens` as a subcommand of `python -m fairseq_tutel`."""
    example = "SAVE DATA --limit 100 --output tokens.html"
    parser = tools.add_parser("tokens", description=__doc__, example=example)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint or a --save-dir")
    parser.add_argument(
        "data", nargs="?", metavar="DATA", help="the data folder [that of the training run]"
    )
    parser.add_argument(
        "--text", action="append", metavar="TEXT", help="a sentence, instead of DATA; repeatable"
    )
    parser.add_argument("--split", default="valid", metavar="SPLIT", help="split of the data set [valid]")
    parser.add_argument("--limit", type=at_least(1), default=500, metavar="N", help=LIMIT)
    parser.add_argument("--model-overrides", default="{}", metavar="DICT", help=OVERRIDES)
    parser.add_argument("--output-statistics", type=Path, metavar="FILE", help=STATISTICS)
    add_output(parser, "the page to write", "tokens.html")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the model on data or texts, and write an HTML page of their tokens and experts."""
    _refuse(arguments)
    template = template_of(Path(__file__).parent / "tokens.html.j2")
    from fairseq_tutel.inference.expert_statistics import text_of
    from fairseq_tutel.plugin.feed_forward import MoEFeedForward
    from fairseq_tutel.tools.tokens.observe import ExpertCounts, of_data, of_texts

    model, task, interface = _opened(arguments)
    experts = {
        name: module.config.num_experts
        for name, module in model.named_modules()
        if isinstance(module, MoEFeedForward)
    }
    if not experts:
        raise ValueError(f"MODEL is {arguments.model}, which has no experts; give that of a MoE model.")
    counts = ExpertCounts()
    if arguments.text:
        samples = list(of_texts(model, interface, arguments.text, counts))
    else:
        samples = list(of_data(model, task, arguments.split, arguments.limit, counts))
    page = template.render(model=arguments.model, content=_json(content(samples, experts)))
    outputs = {"--output": (arguments.output, page)}
    if arguments.output_statistics:
        outputs["--output-statistics"] = arguments.output_statistics, text_of(counts.statistics())
    for flag, (path, text) in outputs.items():
        with writing(path, flag) as file:
            file.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


def _refuse(arguments: argparse.Namespace) -> None:
    outputs = {"--output": arguments.output, "--output-statistics": arguments.output_statistics}
    for flag, path in outputs.items():
        if path:
            refuse_output(path, [Path(arguments.model)], arguments.overwrite, flag)
    if arguments.output_statistics and arguments.output.resolve() == arguments.output_statistics.resolve():
        raise ValueError(f"--output and --output-statistics are both {arguments.output}; give two files.")
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise ValueError(f"WORLD_SIZE is {ranks}, but tokens needs one process; run it without torchrun.")


def _opened(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Load a model; return the model, its fairseq task and, if texts are given, its Python interface."""
    from fairseq import checkpoint_utils

    from fairseq_tutel import plugin
    from fairseq_tutel.plugin import hub

    files = [str(file) for file in hub.files_of(arguments.model, "MODEL")[:1]]
    overrides = _overrides(arguments.model_overrides)
    if arguments.text:
        opened = hub.from_checkpoint(files[0], arguments.data, **overrides)
        if hasattr(opened, "classify"):
            raise ValueError(f"MODEL is {arguments.model}, an image classifier; remove --text.")
        return (opened.models[0] if hasattr(opened, "models") else opened.model), opened.task, opened
    plugin.register()
    if arguments.data:
        overrides["data"] = arguments.data
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(files, arg_overrides=overrides)
    task.load_dataset(arguments.split)
    return models[0].eval(), task, None


def _overrides(text: str) -> dict[str, Any]:
    """Parse the value of --model-overrides, a dictionary in Python's notation."""
    try:
        return dict(ast.literal_eval(text))
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"--model-overrides is {text}; give a dictionary in Python's notation.") from error


def content(samples: Sequence[Any], experts: dict[str, int]) -> dict[str, Any]:
    """Return the data of the page: statistics of each layer, and the experts of the first samples.

    Args:
        samples: the samples from `observe`.
        experts: the number of experts of each MoE layer.
    """
    from fairseq_tutel.tools.tokens.statistics import statistics

    layers = []
    for name, number in experts.items():
        if any(name in sample.experts for sample in samples):
            found = statistics(samples, name, number)
            layers.append({
                "name": name.removesuffix(".fc1"),
                "key": name,
                "load": found.load_E.round(4).tolist(),
                "typical": found.typical,
                "languages": found.languages,
                "parts": found.parts_LE.round(4).tolist(),
            })  # fmt: skip
    return {"layers": layers, "samples": [_shown(sample) for sample in islice(samples, SHOWN)]}


def _shown(sample: Any) -> dict[str, Any]:
    shown = {
        "side": sample.side,
        "language": sample.language,
        "tokens": sample.tokens,
        "experts": {name: values.tolist() for name, values in sample.experts.items()},
        "weights": {name: values.round(2).tolist() for name, values in sample.weights.items()},
    }
    if sample.pixels is not None:
        from PIL import Image

        height, width, channels = sample.pixels.shape
        file = io.BytesIO()
        Image.fromarray(sample.pixels[..., 0] if channels == 1 else sample.pixels).save(file, "png")
        shown |= {"image": base64.b64encode(file.getvalue()).decode(), "height": height, "width": width}
    return shown


def _json(content: dict[str, Any]) -> str:
    """Return JSON that can be embedded in an HTML script element."""
    return json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")
