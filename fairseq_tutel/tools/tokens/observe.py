"""Runs a model on texts, sentences or images, and records the experts of each token.

Shape suffixes are T (tokens of a sample), E (experts) and K (choices per token). The tokens of an image are
its patches.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from fairseq import utils
from torch import Tensor, nn

from fairseq_tutel.inference.expert_statistics import ALL, LayerStatistics, Statistics
from fairseq_tutel.moe.call import Call
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.routing import Routing
from fairseq_tutel.plugin.feed_forward import MoEFeedForward
from fairseq_tutel.plugin.hub_interfaces import Translation
from fairseq_tutel.plugin.run_state import config_of, language_pair
from fairseq_tutel.vision.images import statistics

BATCH = 8


@dataclass
class Sample:
    """A sentence that the encoder or decoder reads, or an image, with the experts of all its tokens.

    Attributes:
        side: encoder, decoder or image.
        language: the language of a sentence, or "" if unknown.
        tokens: the text of each of T tokens; for an image, its class.
        experts: expert IDs [T, K] of each layer, best first; -1 for a dropped assignment.
        weights: weights of the experts, float [T, K] of each layer.
        pixels: an image as uint8 [height, width, channels].
    """

    side: str
    language: str
    tokens: list[str]
    experts: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    pixels: np.ndarray | None = None


class ExpertCounts:
    """Sums over all routings in this run, from which `statistics` computes statistics of experts."""

    def __init__(self) -> None:
        # For each language pair and layer, a tensor [3, E] with three sums per expert: the tokens whose
        # first choice is the expert, the probabilities of these choices, and the expert's assignments.
        self._sums: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, pair: str, layer: MoEFeedForward, routing: Routing) -> None:
        """Add a layer's routing of a batch to the sums of the language pair."""
        probs_TE = routing.probs_TE.double()
        num_experts = probs_TE.shape[1]
        # If experts choose tokens, the columns of expert_ids_TK are not sorted by score.
        by_experts = layer.config.choice == "experts"
        first_T = probs_TE.argmax(dim=1) if by_experts else routing.expert_ids_TK[:, 0]
        if routing.real_T is not None:
            first_T, probs_TE = first_T[routing.real_T], probs_TE[routing.real_T]
        prob_T = probs_TE.gather(1, first_T.unsqueeze(1)).squeeze(1)
        sums_3E = torch.stack([
            first_T.bincount(minlength=num_experts).double(),
            first_T.bincount(prob_T, minlength=num_experts),
            routing.assigned_KE.sum(dim=0).double(),
        ]).cpu()  # fmt: skip
        layers = self._sums.setdefault(pair, {})
        layers[layer.label] = layers.get(layer.label, 0) + sums_3E

    def statistics(self) -> Statistics:
        """Return the statistics of every language pair and layer that routed a token.

        Raises:
            ValueError: a gate's probabilities are not finite, for example because weights are NaN.
        """
        sums = [sums_3E for layers in self._sums.values() for sums_3E in layers.values()]
        if not all(sums_3E.isfinite().all() for sums_3E in sums):
            raise ValueError("a gate gives probabilities that are not finite; give another MODEL.")
        return {
            pair: {label: _statistics(sums_3E) for label, sums_3E in layers.items() if sums_3E[2].any()}
            for pair, layers in self._sums.items()
        }


def _statistics(sums_3E: torch.Tensor) -> LayerStatistics:
    first_E, prob_E, assigned_E = sums_3E
    return LayerStatistics(
        tokens=int(first_E.sum()),
        activity=(first_E / first_E.sum()).tolist(),
        confidence=(prob_E / first_E.clamp_min(1)).tolist(),
        load=(assigned_E / assigned_E.mean()).tolist(),
    )


class Recorder:
    """A router that stores a layer's last routing, with expert IDs and weights as arrays [batch, T, K]."""

    def __init__(self, layer: MoEFeedForward) -> None:
        self.layer, self.before = layer, layer.router
        self.routing: Routing | None = None
        self.experts: np.ndarray | None = None
        self.weights: np.ndarray | None = None

    def routing_of(self, layer: MoELayer, x_TD: Tensor, call: Call) -> Routing:
        """Route tokens as without a recorder, and store their expert IDs and weights."""
        route = layer.route if self.before is None else partial(self.before.routing_of, layer)
        self.routing = routing = route(x_TD, call)
        used = routing.expert_ids_TK.where(routing.row_of_TK >= 0, -1)
        self.experts, self.weights = (_by_sentence(values, call) for values in (used, routing.weights_TK))
        return routing


def _by_sentence(values_TK: Tensor, call: Call) -> np.ndarray:
    array = values_TK.float().cpu().numpy().reshape(*call.shape, -1)
    return array.swapaxes(0, 1) if call.time_first else array


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, Recorder]]:
    """Context manager that records the routing of all MoE layers; yields a `Recorder` per layer name."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, MoEFeedForward)}
    recorders = {name: Recorder(layer) for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.router = recorders[name]
    try:
        yield recorders
    finally:
        for name, layer in layers.items():
            layer.router = recorders[name].before


def of_texts(model: Any, opened: Any, texts: Sequence[str], counts: ExpertCounts) -> Iterator[Sample]:
    """Run the model on texts, and yield a `Sample` with the chosen experts for each sequence of tokens.

    Args:
        model: the model of `opened`.
        opened: the Python interface that `from_checkpoint` returned.
        texts: sentences; the decoder of a translation model reads the model's translation.
        counts: counts the choices of all gates.
    """
    pair = pair_of(opened.task)
    for text in texts:
        tokens = opened.encode(text).cpu()
        batch = {"src_tokens": tokens[None], "src_lengths": torch.tensor([len(tokens)])}
        if isinstance(opened, Translation):
            batch["prev_output_tokens"] = opened.generate([tokens])[0][0]["tokens"].cpu().roll(1)[None]
        elif hasattr(model, "encoder") and hasattr(model, "decoder"):
            batch["prev_output_tokens"] = tokens.roll(1)[None]
        elif hasattr(model, "decoder"):
            batch["src_tokens"] = tokens.roll(1)[None]
        with _counted(model, counts, pair) as recorders:
            model(**_on_device(model, batch))
        yield from _sentences(recorders, batch, _dictionaries(opened.task), ("", ""), [0])


def of_data(model: Any, task: Any, split: str, limit: int, counts: ExpertCounts) -> Iterator[Sample]:
    """Run the model on a loaded split of the data, and yield a `Sample` for each sequence or image.

    Only the first `limit` sentences (of each language pair) or images of the split are read. `counts`
    counts the choices of all gates.
    """
    for languages, dataset in parts_of(task, split):
        dataset.ordered_indices()  # Multilingual data sets need this call before indexing.
        numbers = range(min(limit, len(dataset)))
        for start in numbers[::BATCH]:
            batch = dataset.collater([dataset[i] for i in numbers[start : start + BATCH]])
            if "images" in batch.get("net_input", ()):
                yield from _images(model, batch, task.class_names, counts)
            elif "net_input" in batch:
                pair = "-".join(languages) if all(languages) else pair_of(task)
                with _counted(model, counts, pair) as recorders:
                    model(**_on_device(model, batch["net_input"]))
                rows = batch["id"].argsort().tolist()  # fairseq has sorted sentences by length.
                yield from _sentences(recorders, batch["net_input"], _dictionaries(task), languages, rows)
            else:  # The batch has several language pairs.
                yield from _pairs(model, batch, task, counts)


def parts_of(task: Any, split: str) -> list[tuple[tuple[str, str], Any]]:
    """Return the languages and the data set of each part of a data split.

    Only a split of the task `translation_multi_simple_epoch` has several parts. Any other split has one
    part, with the languages ("", "").
    """
    dataset, manager = task.dataset(split), getattr(task, "data_manager", None)
    if manager is None or not hasattr(dataset, "datasets"):
        return [(("", ""), dataset)]
    found = manager.get_split_data_param_list(split, epoch=1)
    return [
        ((str(each["src"]), str(each["tgt"])), part)
        for each, part in zip(found, dataset.datasets, strict=True)
    ]


def pair_of(task: Any) -> str:
    """Return a task's language pair, such as de-en, or ALL if the task does not have two languages."""
    return language_pair(config_of(task)) or ALL


def _pairs(model: Any, batch: dict[str, Any], task: Any, counts: ExpertCounts) -> Iterator[Sample]:
    """Run the model of each language pair on the pair's part of a batch, and yield the part's samples."""
    for pair, part in ((pair, part) for pair, part in batch.items() if part):
        source, target = pair.split("-")
        dictionaries = {"encoder": task.dicts.get(source), "decoder": task.dicts.get(target)}
        rows, inputs = part["id"].argsort().tolist(), part["net_input"]
        with _counted(model, counts, pair) as recorders:
            model.models[pair](**_on_device(model, inputs))
        yield from _sentences(recorders, inputs, dictionaries, (source, target), rows)


@contextmanager
def _counted(model: Any, counts: ExpertCounts, pair: str) -> Iterator[dict[str, Recorder]]:
    """Context manager that records and counts the routing of all MoE layers for one language pair."""
    with torch.inference_mode(), recording(model) as recorders:
        yield recorders
        for recorder in recorders.values():
            if recorder.routing is not None:
                counts.add(pair, recorder.layer, recorder.routing)


def _on_device(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return utils.apply_to_sample(lambda tensor: tensor.to(next(model.parameters()).device), batch)


def _dictionaries(task: Any) -> dict[str, Any]:
    return {"encoder": task.source_dictionary, "decoder": task.target_dictionary or task.source_dictionary}


def _sentences(
    recorders: dict[str, Recorder],
    batch: dict[str, Tensor],
    dictionaries: dict[str, Any],
    languages: tuple[str, ...],
    rows: Sequence[int],
) -> Iterator[Sample]:
    ids = {"encoder": batch["src_tokens"], "decoder": batch.get("prev_output_tokens", batch["src_tokens"])}
    for side, language in zip(("encoder", "decoder"), languages, strict=True):
        ran = {
            name: recorder
            for name, recorder in recorders.items()
            if side in name.split(".") and recorder.experts is not None
        }
        symbols = dictionaries[side]
        for row in rows if ran else ():
            tokens = ids[side][row].tolist()
            places = [i for i, token in enumerate(tokens) if token != symbols.pad()]
            sample = Sample(side, language, [symbols[tokens[i]] for i in places])
            for name, recorder in ran.items():
                _keep(sample, name, recorder, row, places)
            yield sample


def _images(
    model: Any, batch: dict[str, Any], classes: Sequence[str], counts: ExpertCounts
) -> Iterator[Sample]:
    images = batch["net_input"]["images"].to(next(model.parameters()).device)
    with _counted(model, counts, ALL) as recorders:
        model(images)
    mean, std = statistics(images.shape[1])
    scaled = (images.float().cpu() * std + mean).clamp(0, 1) * 255
    for row, (pixels, target) in enumerate(zip(scaled, batch["target"].tolist(), strict=True)):
        sample = Sample("image", "", [classes[target]], pixels=pixels.permute(1, 2, 0).byte().numpy())
        for name, recorder in recorders.items():
            _keep(sample, name, recorder, row, None)
        yield sample


def _keep(sample: Sample, name: str, recorder: Recorder, row: int, places: list[int] | None) -> None:
    assert recorder.experts is not None and recorder.weights is not None
    chosen = slice(None) if places is None else places
    sample.experts[name] = recorder.experts[row][chosen].astype(np.int64)
    sample.weights[name] = recorder.weights[row][chosen]
