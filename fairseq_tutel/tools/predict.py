"""predict: classify images with a trained model, and write the predicted classes to a file.

The images are one split of a data folder, as in training: folders of classes, or arrays. Each line of the
file has an image, its class, and up to five predicted classes with probabilities, the most likely first.

B images of a batch, C classes.
"""

import argparse
import csv
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_tutel.option import key_of
from fairseq_tutel.tools.arguments import refuse_folder, refuse_output, writing
from fairseq_tutel.tools.parser import add_output

# Largest number of predicted classes in a line.
LINE = 5
# Flag, smallest value, default, help.
NUMBERS = (
    ("--limit", 1, None, "images to read [all]"),
    ("--batch-size", 1, 64, "number of images per batch [64]"),
    ("--num-workers", 0, 0, "number of processes that decode images [0]"),
)
# Index of an image, its class, and predicted pairs (class, probability), the most likely first.
Answer = tuple[int, int, list[tuple[int, float]]]


def add_to(tools: Any) -> None:
    """Add this tool as a subcommand of `python -m fairseq_tutel`."""
    example = "SAVE DATA --split test --output test.csv"
    parser = tools.add_parser("predict", description=__doc__, example=example)
    parser.add_argument(
        "model", metavar="MODEL", help="a checkpoint of an image classifier, or its --save-dir"
    )
    parser.add_argument("data", metavar="DATA", help="the data folder")
    parser.add_argument("--split", default="valid", metavar="SPLIT", help="split of the data set [valid]")
    add_output(parser, "the file to write", "predictions.csv")
    for flag, _, default, text in NUMBERS:
        parser.add_argument(flag, type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--image-errors", choices=("refuse", "skip"), help="action for unreadable images [as in training]"
    )
    parser.add_argument("--user-dir", metavar="FOLDER", help="folder that defines a custom model")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Classify the images and write the predictions to the output file."""
    for flag, least, _, _ in NUMBERS:
        value = getattr(arguments, key_of(flag))
        if value is not None and value < least:
            raise ValueError(f"{flag} is {value}; give a number of at least {least}.")
    refuse_output(arguments.output, [Path(arguments.model)], arguments.overwrite)
    logging.disable(logging.INFO)  # a module that fairseq imports enables all logs
    try:
        _predict(arguments)
    finally:
        logging.disable(logging.NOTSET)


def _predict(arguments: argparse.Namespace) -> None:
    model, task = _opened(arguments)
    task.load_dataset(arguments.split)
    dataset, names = task.dataset(arguments.split), task.class_names
    # Keep one answer per image: a batch without readable images contains an image of another batch.
    answers = {answer[0]: answer for answer in _answers(model, dataset, arguments)}.values()
    numbers = range(1, min(LINE, len(names)) + 1)
    # File names may be invalid UTF-8.
    with (
        writing(arguments.output) as path,
        path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        lines = csv.writer(file)
        lines.writerow(["image", "class", *(f"{k}_{n}" for n in numbers for k in ("class", "probability"))])
        for image, target, found in answers:
            cells = [cell for c, p in found for cell in (names[c], f"{p:.6f}")]
            lines.writerow([dataset.images.name(image), names[target], *cells])
    right = sum(found[0][0] == target for _, target, found in answers)
    print(f"{right:,} of {len(answers):,} images right, {100 * right / len(answers):.2f} %")
    print(f"wrote {arguments.output}")


def _opened(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Load a checkpoint; return its model in evaluation mode, and its fairseq task."""
    # fairseq is imported here, because the import takes seconds.
    from fairseq import checkpoint_utils
    from fairseq.utils import import_user_module

    from fairseq_tutel import plugin
    from fairseq_tutel.plugin.hub import files_of

    refuse_folder("DATA", arguments.data)
    plugin.register()
    import_user_module(argparse.Namespace(user_dir=arguments.user_dir))
    overrides = {"data": arguments.data}
    if arguments.image_errors is not None:
        overrides["image_errors"] = arguments.image_errors
    files = [str(file) for file in files_of(arguments.model, "MODEL")[:1]]
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(files, arg_overrides=overrides)
    if not hasattr(task, "class_names"):
        raise ValueError(
            f"MODEL is {arguments.model}, whose task is {type(task).__name__}; give a model for "
            "image_classification."
        )
    return models[0].eval(), task


def _answers(model: Any, dataset: Any, arguments: argparse.Namespace) -> Iterator[Answer]:
    import torch
    from torch.utils.data import DataLoader, Subset

    from fairseq_tutel.parallel.progress import progress

    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.cpu else "cpu")
    model = model.to(device)
    count = min(len(dataset), arguments.limit or len(dataset))
    batches = DataLoader(
        Subset(dataset, range(count)),
        arguments.batch_size,
        collate_fn=dataset.collater,
        num_workers=arguments.num_workers,
    )
    with progress("classifying", count, "image") as advance:
        for batch in batches:
            if "refused" in batch:
                raise ValueError(batch["refused"])
            with torch.inference_mode():
                output = model(batch["net_input"]["images"].to(device))
                probs_BC = model.get_normalized_probs(output, log_probs=False)
                best = probs_BC.topk(min(LINE, probs_BC.shape[1]), dim=1)
            columns = (batch["id"], batch["target"], best.indices, best.values)
            for image, target, classes, probs in zip(*(c.tolist() for c in columns), strict=True):
                yield image, target, list(zip(classes, probs, strict=True))
            advance(len(batch["id"]))
