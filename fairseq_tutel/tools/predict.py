"""predict: writes a trained model's classes of images, and draws right and wrong answers.

The images are one split of a data folder, as in training: folders of classes, or arrays. Each line of the
file has an image, its class, and up to five classes with their probabilities, the most likely first.

B images of a batch, C classes.
"""

import argparse
import csv
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_tutel.tools.arguments import add_overwrite, needing, refuse_output, writing

# Most classes in a line.
LINE = 5
# Columns and rows of the grid, and colours of answers, for colour-blind readers.
COLUMNS, ROWS, RIGHT, WRONG = 6, 6, "#00795a", "#c44e00"


@dataclass(frozen=True)
class Answer:
    """An image's number, its class, and (class, probability) of the model, the most likely first."""

    image: int
    target: int
    found: list[tuple[int, float]]

    @property
    def is_right(self) -> bool:
        """Whether the most likely class is correct."""
        return self.found[0][0] == self.target


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser("predict", help="write a model's classes of images", description=__doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a model of the task image_classification")
    parser.add_argument("data", metavar="DATA", help="folder with the split")
    parser.add_argument("--split", default="valid", help="the images [valid]")
    for flag, default, text in (
        ("--output", Path("predictions.csv"), "the file to write [predictions.csv]"),
        (
            "--grid",
            None,
            f"draw up to {COLUMNS * ROWS} images, half of them wrong ones if there are enough",
        ),
    ):
        parser.add_argument(flag, type=Path, default=default, metavar="FILE", help=text)
    for flag, number, text in (
        ("--limit", None, "use the first N images only"),
        ("--batch-size", 64, "images at a time [64]"),
        ("--num-workers", 0, "processes that decode images [0]"),
    ):
        parser.add_argument(flag, type=int, default=number, metavar="N", help=text)
    parser.add_argument(
        "--image-errors", choices=("refuse", "skip"), help="action for unreadable images [as in training]"
    )
    parser.add_argument("--user-dir", metavar="DIR", help="--user-dir of a custom model")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    add_overwrite(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Write the file, and draw the grid."""
    for flag, least in (("limit", 1), ("batch_size", 1), ("num_workers", 0)):
        value = getattr(arguments, flag)
        if value is not None and value < least:
            raise ValueError(f"--{flag.replace('_', '-')} is {value}; give a number of at least {least}.")
    for flag, path in (("--output", arguments.output), ("--grid", arguments.grid)):
        if path is not None:
            refuse_output(path, [Path(arguments.checkpoint)], arguments.overwrite, flag)
    if arguments.grid is not None:
        with needing("--grid", "vision"):
            from matplotlib.backend_bases import FigureCanvasBase  # before the work
        kinds = FigureCanvasBase.get_supported_filetypes()
        if arguments.grid.suffix.lower()[1:] not in kinds or arguments.grid == arguments.output:
            raise ValueError(
                f"--grid is {arguments.grid}; give a name that ends with .png, .svg or "
                ".pdf, another than --output."
            )
    logging.disable(logging.INFO)  # a module that fairseq imports enables all logs
    try:
        _predict(arguments)
    finally:
        logging.disable(logging.NOTSET)


def _predict(arguments: argparse.Namespace) -> None:
    model, task = _opened(arguments)
    task.load_dataset(arguments.split)
    dataset, names = task.dataset(arguments.split), task.class_names
    # Unique numbers: a batch of unreadable images contains an image of another batch.
    answers = list({each.image: each for each in _answers(model, dataset, arguments)}.values())
    with writing(arguments.output) as file:
        _write(answers, dataset, names, file)
    right = sum(answer.is_right for answer in answers)
    print(f"{right:,} of {len(answers):,} images right, {100 * right / len(answers):.2f} %")
    print(f"wrote {arguments.output}")
    if arguments.grid is not None:
        with writing(arguments.grid, "--grid") as file:
            _draw(answers, dataset, names, file)
        print(f"wrote {arguments.grid}")


def _opened(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model in evaluation mode, and its task. fairseq is imported here: it takes seconds."""
    from fairseq import checkpoint_utils
    from fairseq.utils import import_user_module

    from fairseq_tutel import plugin

    if Path(arguments.checkpoint).is_dir():
        raise ValueError(
            f"CHECKPOINT is {arguments.checkpoint}, a folder; give a file of it, such as "
            f"{Path(arguments.checkpoint) / 'checkpoint_best.pt'}."
        )
    plugin.register()
    import_user_module(argparse.Namespace(user_dir=arguments.user_dir))
    overrides = {"data": arguments.data}
    if arguments.image_errors is not None:
        overrides["image_errors"] = arguments.image_errors
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [arguments.checkpoint], arg_overrides=overrides
    )
    if not hasattr(task, "class_names"):
        raise ValueError(
            f"CHECKPOINT is {arguments.checkpoint}, a model of {type(task).__name__}; give one of the task "
            "image_classification."
        )
    return models[0].eval(), task


def _answers(model: Any, dataset: Any, arguments: argparse.Namespace) -> Iterator[Answer]:
    import torch
    from torch.utils.data import DataLoader, Subset

    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.cpu else "cpu")
    model = model.to(device)
    count = min(len(dataset), arguments.limit or len(dataset))
    batches = DataLoader(
        Subset(dataset, range(count)),
        arguments.batch_size,
        collate_fn=dataset.collater,
        num_workers=arguments.num_workers,
    )
    for batch in batches:
        if "refused" in batch:
            raise ValueError(batch["refused"])
        with torch.inference_mode():
            output = model(batch["net_input"]["images"].to(device))
            probs_BC = model.get_normalized_probs(output, log_probs=False)
            best = probs_BC.topk(min(LINE, probs_BC.shape[1]), dim=1)
        columns = (batch["id"], batch["target"], best.indices, best.values)
        for image, target, classes, probs in zip(*(c.tolist() for c in columns), strict=True):
            yield Answer(image, target, list(zip(classes, probs, strict=True)))


def _write(answers: list[Answer], dataset: Any, names: list[str], path: Path) -> None:
    # File names may be invalid UTF-8.
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        lines = csv.writer(file)
        numbers = range(1, len(answers[0].found) + 1)
        lines.writerow(["image", "class", *(f"{k}_{n}" for n in numbers for k in ("class", "probability"))])
        for answer in answers:
            found = [cell for c, p in answer.found for cell in (names[c], f"{p:.6f}")]
            lines.writerow([dataset.images.name(answer.image), names[answer.target], *found])


def _spread(answers: list[Answer]) -> list[Answer]:
    """Return the answers so that classes alternate: data sets are sorted by class."""
    of_class: Counter[int] = Counter()
    rounds = []
    for answer in answers:
        rounds.append(of_class[answer.target])
        of_class[answer.target] += 1
    order = sorted(range(len(answers)), key=rounds.__getitem__)
    return [answers[i] for i in order]


def _draw(answers: list[Answer], dataset: Any, names: list[str], path: Path) -> None:
    """Draw wrong answers, then right ones, half of the grid each if there are enough."""
    from matplotlib.figure import Figure

    kinds = [_spread([a for a in answers if a.is_right is right]) for right in (False, True)]
    room = COLUMNS * ROWS
    wrong = kinds[0][: max(room // 2, room - len(kinds[1]))]
    shown = wrong + kinds[1][: room - len(wrong)]
    rows = -(-len(shown) // COLUMNS)
    figure = Figure(figsize=(1.6 * COLUMNS, 1.9 * rows + 0.3), layout="constrained")
    for axes in figure.subplots(rows, COLUMNS, squeeze=False).flat[len(shown) :]:
        axes.set_axis_off()
    for axes, answer in zip(figure.axes, shown, strict=False):
        image = dataset[answer.image]["image"] * dataset.std + dataset.mean
        pixels = image[: 3 if len(image) >= 3 else 1].clamp(0, 1).permute(1, 2, 0)
        axes.imshow(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=1)
        (best, probability), color = answer.found[0], RIGHT if answer.is_right else WRONG
        text = f"{names[best]} ({probability:.0%})"
        text += "" if answer.is_right else f"\nis {names[answer.target]}"
        text = text.encode(errors="backslashreplace").decode()
        axes.set_title(text, color=color, fontsize=9, parse_math=False)
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set(color=color, linewidth=2)
    figure.savefig(path, dpi=110)
