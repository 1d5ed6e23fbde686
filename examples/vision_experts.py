"""Draw which patches of pictures go to which expert.

    python examples/vision_experts.py CHECKPOINT DATA PICTURE

CHECKPOINT is a MoE model of the task image_classification. DATA is its data folder, of which the test split
is used. The upper part shows one picture of every class, with one row per MoE layer in which each patch has
the color of its first expert. The lower part shows, for each layer and expert, the share of patches at each
position that the expert gets. B pictures, L patches per picture, C classes, E experts.
"""

import argparse
import logging
import math
import sys
from pathlib import Path

import torch
from fairseq import checkpoint_utils, utils
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor, nn

from fairseq_tutel.moe.call import Call
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.routing import Routing
from fairseq_tutel.plugin.feed_forward import moe_layers

USER_DIR = Path(__file__).resolve().parents[1] / "user_dir"
BATCH = 100
CLASSES = 10  # maximum number of classes to draw


class Watch:
    """Records the first expert of every patch as ids_BL for each layer, without changing the routing."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, list[Tensor]] = {}
        for layer in moe_layers(model):
            self.seen[layer.label] = []
            layer.router = self

    def routing_of(self, layer: MoELayer, x_TD: Tensor, call: Call) -> Routing:
        """Return the layer's routing, and record it."""
        routing = layer.route(x_TD, call)
        ids_T = routing.expert_ids_TK[:, 0]
        pictures, patches = call.sentences or (1, len(ids_T))
        first = ids_T.view(patches, pictures).t() if call.time_first else ids_T.view(-1, patches)
        self.seen[layer.label].append(first)
        return routing


@torch.no_grad()
def watched(checkpoint: str, data: str) -> tuple[Tensor, Tensor, dict[str, Tensor], int]:
    """Return images [B, channels, H, W], labels [B], ids_BL by layer, and E."""
    utils.import_user_module(argparse.Namespace(user_dir=str(USER_DIR)))
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([checkpoint], {"data": data})
    task.load_dataset("test")
    dataset = task.dataset("test")
    watch, images, labels = Watch(model.eval()), [], []
    for start in range(0, len(dataset), BATCH):
        rows = range(start, min(start + BATCH, len(dataset)))
        sample = dataset.collater([dataset[i] for i in rows])
        model(**sample["net_input"])
        images.append(sample["net_input"]["images"])
        labels.append(sample["target"])
    ids = {label: torch.cat(parts) for label, parts in watch.seen.items()}
    return torch.cat(images), torch.cat(labels), ids, moe_layers(model)[0].config.num_experts


def draw(images: Tensor, labels: Tensor, ids: dict[str, Tensor], experts: int, path: Path) -> None:
    """Draw the result of `watched`, and write the picture."""
    classes = labels.unique()[:CLASSES]
    examples = [int((labels == each).nonzero()[0]) for each in classes]
    colours = colormaps["tab10" if experts <= 10 else "tab20"]
    figure = Figure(figsize=(10, 1.1 * (1 + 2 * len(ids))), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1 + len(ids), 1.3 * len(ids)))
    axes = above.subplots(1 + len(ids), len(examples), squeeze=False)
    places = below.subplots(len(ids), experts, squeeze=False)
    for column, example in enumerate(examples):
        grey = images[example].mean(0)
        height, width = grey.shape
        axes[0, column].imshow(grey, cmap="gray")
        for row, ids_BL in enumerate(ids.values(), start=1):
            axis = axes[row, column]
            axis.imshow(grey, cmap="gray")
            extent = (-0.5, width - 0.5, height - 0.5, -0.5)
            axis.imshow(
                colours(_square(ids_BL[example])), extent=extent, alpha=0.6, interpolation="nearest"
            )
    for row, (label, ids_BL) in enumerate(ids.items()):
        axes[row + 1, 0].set_ylabel(label, fontsize="small")
        places[row, 0].set_ylabel(label, fontsize="small")
        for e in range(experts):
            share_L = (ids_BL == e).double().mean(0)
            axis = places[row, e]
            axis.imshow(_square(share_L), vmin=0, vmax=1, cmap="magma")
            load = 100 * share_L.mean()
            axis.set_title(f"{e}: {load:.0f} %", fontsize="small", color=colours(e))
    for axis in (*axes.flat, *places.flat):
        axis.set_xticks([])
        axis.set_yticks([])
    figure.savefig(path, dpi=110)


def _square(of_patches_L: Tensor) -> Tensor:
    """Reshape the values of L patches of a square picture to [side, side]."""
    side = math.isqrt(len(of_patches_L))
    return of_patches_L.view(side, side)


def main(checkpoint: str, data: str, picture: str) -> None:
    """Draw the picture, and print how evenly the patches are spread over the experts."""
    logging.disable(logging.INFO)
    *found, ids, experts = watched(checkpoint, data)
    draw(*found, ids, experts, Path(picture))
    for label, ids_BL in ids.items():
        load_E = ids_BL.flatten().bincount(minlength=experts).double() / ids_BL.numel()
        shares = " ".join(f"{100 * share:.0f}" for share in load_E)
        print(f"{label}: patches of each expert, %: {shares}")


if __name__ == "__main__":
    main(*sys.argv[1:])
