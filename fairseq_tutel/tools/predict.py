"""The tool `predict` classifies images with a trained model, and writes the predicted classes to a file.

The images are one split of a data folder, as in training: folders of classes, or arrays. Each line of the
output file has an image, its class, and up to five predicted classes with probabilities.

Shape suffixes are B (images of a batch) and C (classes).
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_tutel.tools.arguments import at_least, refuse_output, writing
from fairseq_tutel.tools.parser import add_output

# Largest number of predicted classes in a line of the output.
LINE = 5
# The index of an image, its true class, and pairs (predicted class, probability), most likely first.
Answer = tuple[int, int, list[tuple[int, float]]]


def add_to(tools: Any) -> None:
    """Add the tool `predict` as a subcommand of `python -m fairseq_tutel`."""
    example = "SAVE DATA --split test --output test.csv"
    parser = tools.add_parser("predict", description=__doc__, example=example)
    parser.add_argument(
        "model", metavar="MODEL", help="a checkpoint of an image classifier, or its --save-dir"
    )
    parser.add_argument("data", metavar="DATA", help="the data folder")
    parser.add_argument("--split", default="valid", metavar="SPLIT", help="split of the data set [valid]")
    add_output(parser, "the file to write", "predictions.csv")
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="number of images to read [all]")
    text = "number of images per batch [64]"
    parser.add_argument("--batch-size", type=at_least(1), default=64, metavar="N", help=text)
    parser.add_argument("--user-dir", metavar="FOLDER", help="folder that defines a custom model")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Classify the images, and write the predicted classes to the output file."""
    refuse_output(arguments.output, [Path(arguments.model)], arguments.overwrite)
    from fairseq_tutel.parallel.progress import progress
    from fairseq_tutel.plugin.hub import from_checkpoint

    options: dict[str, Any] = {"user_dir": arguments.user_dir} if arguments.user_dir else {}
    device = "cpu" if arguments.cpu else None
    opened = from_checkpoint(arguments.model, arguments.data, device=device, **options)
    task = opened.task
    if not hasattr(task, "class_names"):
        raise ValueError(f"MODEL is {arguments.model}, which is no image classifier; give another model.")
    task.load_dataset(arguments.split)
    dataset, names = task.dataset(arguments.split), task.class_names
    numbers = range(min(len(dataset), arguments.limit or len(dataset)))
    with progress("classifying", len(numbers), "image") as advance:
        answers: list[Answer] = []
        for start in numbers[:: arguments.batch_size]:
            batch = dataset.collater([dataset[i] for i in numbers[start : start + arguments.batch_size]])
            answers += _answers(opened.models[0], batch)
            advance(len(batch["id"]))
    ranks = range(1, min(LINE, len(names)) + 1)
    text: Any = {"newline": "", "encoding": "utf-8", "errors": "backslashreplace"}
    with writing(arguments.output) as path, path.open("w", **text) as file:
        lines = csv.writer(file)
        lines.writerow(["image", "class", *(f"{k}_{n}" for n in ranks for k in ("class", "probability"))])
        for image, target, found in answers:
            cells = [cell for c, p in found for cell in (names[c], f"{p:.6f}")]
            lines.writerow([dataset.images.name(image), names[target], *cells])
    right = sum(found[0][0] == target for _, target, found in answers)
    print(f"{right:,} of {len(answers):,} images right, {100 * right / len(answers):.2f} %")
    print(f"wrote {arguments.output}")


def _answers(model: Any, batch: Any) -> Iterator[Answer]:
    import torch

    with torch.inference_mode():
        output = model(batch["net_input"]["images"].to(next(model.parameters()).device))
        probs_BC = model.get_normalized_probs(output, log_probs=False)
        best = probs_BC.topk(min(LINE, probs_BC.shape[1]), dim=1)
    columns = (batch["id"], batch["target"], best.indices, best.values)
    for image, target, classes, probs in zip(*(column.tolist() for column in columns), strict=True):
        yield image, target, list(zip(classes, probs, strict=True))
