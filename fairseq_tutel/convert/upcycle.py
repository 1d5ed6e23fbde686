"""convert upcycle: make a Mixture-of-Experts checkpoint of a dense one, each expert a copy.

Every chosen layer's feed-forward network becomes experts, all of which begin as that network, and a gate
that is drawn anew (Komatsuzaki et al. 2022, Sparse Upcycling). With --moe-expert-ffn-dim a whole part of
the network's width, an expert is such a part (He et al. 2024): as many experts for a token as parts then
cost what the dense layer costs. Where the weights of a token's experts sum to 1, the model computes
what the dense one did; the tool says whether it does. Without --copy-optimizer-state a training begins
anew with it: give it to --finetune-from-model.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel import plugin
from fairseq_tutel.inference.pregate import refuse_too_far
from fairseq_tutel.moe.config import MoEConfig, options_of
from fairseq_tutel.moe.options import flag_of, options_in, read, refuse_bad_values
from fairseq_tutel.plugin.feed_forward import SIDES, chosen_layers
from fairseq_tutel.tools.arguments import add_conversion
from fairseq_tutel.checkpoint.reading import begun_anew, load, write
from fairseq_tutel.checkpoint.saved import (
    DENSE,
    LAYER_NORM,
    Layer,
    counts_text,
    dense_step,
    layers_of,
)
from fairseq_tutel.convert.optimizer_state import InexactError, checked, one_group, trained
from fairseq_tutel.convert.names import SWIN, model_options, name_of, rename, with_experts
from fairseq_tutel.convert.upcycle_layer import (
    Variation,
    copies,
    differences,
    moe_tensors,
    trained_tensors,
)
from fairseq_tutel.vision.options import SwinExpertsConfig
from fairseq_tutel.zero.state import MASTER

FIX = "leave --copy-optimizer-state out"
OF_SWIN = options_in(SwinExpertsConfig)
SWIN_KEYS = [option.key for option in OF_SWIN]
# Fields of `Variation`: default, metavar, help, and which values there are, in code and in words.
VARIATIONS: tuple[tuple[str, float, str, str, Callable[[float], bool], str], ...] = (
    (
        "perturb", 0, "STD",
        "gaussian noise on the experts' weights, in standard deviations of the matrix",
        lambda v: 0 <= v < 100, "a finite number, at least 0",
    ),
    (
        "reinitialize", 0, "SHARE",
        "share of each expert's hidden units to draw anew by the statistics of the old ones, other "
        "units in each expert (Drop-Upcycling, Nakamura et al. 2025, who take 0.5)",
        lambda v: 0 <= v <= 1, "a number from 0 to 1",
    ),
    (
        "gate_scale", 1, "X",
        "multiply the gates' drawn weights; the smaller, the more even a token's probabilities",
        lambda v: 0 < v < 1e6, "a number above 0",
    ),
)  # fmt: skip


def add_to(kinds: Any) -> None:
    """Add the conversion to the command line."""
    text = "make a MoE checkpoint of a dense one, each expert a copy of its feed-forward network"
    parser = add_conversion(kinds, "upcycle", convert, text, __doc__, "the dense checkpoint")
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of gates and all else that is drawn [1]"
    )
    for key, default, metavar, text, _, _ in VARIATIONS:
        parser.add_argument(
            flag_of(key), type=float, default=default, metavar=metavar, help=f"{text} [{default:g}]"
        )
    parser.add_argument(
        "--copy-optimizer-state",
        action="store_true",
        help="keep the optimizer's moments, each expert's those of its network, and the place in the data, "
        "for a training that goes on by --restore-file",
    )
    parser.late = _add_model_options


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    plugin.register()
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    from fairseq_tutel.plugin.flags import EncoderDecoderOptions, made

    group = parser.add_argument_group("the experts, as for fairseq-train; saved with the model")
    for options in (EncoderDecoderOptions, made("SwinExpertsOptions", OF_SWIN)):
        gen_parser_from_dataclass(group, options(), delete_default=True, with_prefix="")


def convert(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    """Convert as the command line says, and say what the result computes."""
    how = _variation(arguments)
    state = load(path, "--input")
    layers = _give_options(state, _given_model_options(arguments))
    write(_upcycled(state, layers, how, arguments.copy_optimizer_state), output)
    counts = counts_text([config.num_experts for config in layers.values()])
    first, labels = next(iter(layers.values())), ", ".join(layer.label for layer in layers)
    print(
        f"wrote {output}: {name_of(state, 'model')}, {counts} experts of {first.hidden_dim}, "
        f"top-{first.top_k}, in {labels}"
    )
    reasons = dict.fromkeys(r for config in layers.values() for r in differences(config, how))
    if reasons:
        print(f"its first output is not the dense model's: {'; '.join(reasons)}")
    else:
        print("its first output is the dense model's, to rounding")


def _variation(arguments: argparse.Namespace) -> Variation:
    values = {key: getattr(arguments, key) for key, *_ in VARIATIONS}
    for key, _, _, _, holds, fix in VARIATIONS:
        if not holds(values[key]):
            raise ValueError(f"{flag_of(key)} is {values[key]:g}; give {fix}.")
    return Variation(seed=arguments.seed, **values)


def _given_model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the experts' options that the command line gives, by their keys."""
    keys = [option.key for option in (*options_of("model"), *OF_SWIN)]
    values = {key: getattr(arguments, key) for key in keys}
    # A flag that is not given is None or, of a switch, False; 0 is a value.
    return {key: value for key, value in values.items() if value is not None and value is not False}


def _give_options(state: dict[str, Any], given: Mapping[str, Any]) -> dict[Layer, MoEConfig]:
    """Make a dense checkpoint's options those of a MoE model; return which layers get which experts.

    The options are changed in place; task, criterion and optimizer get the names of their twins too.
    """
    from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_DATACLASS_REGISTRY

    from fairseq_tutel.plugin.flags import (
        EncoderDecoderOptions,
        ModelOptions,
        defaults,
        expert_counts,
    )
    from fairseq_tutel.plugin.install import refuse_options

    model, options = state["model"], model_options(state)
    layers = layers_of(model)
    if any(layer.has_experts for layer in layers):
        raise ValueError("--input has experts already; give the checkpoint of a dense model.")
    arch = _take_names_of_twins(state)
    known = defaults(EncoderDecoderOptions if _has_two_sides(layers) else ModelOptions)
    dataclass = MODEL_DATACLASS_REGISTRY.get(arch)
    if arch.startswith(SWIN) and dataclass is not None:  # its experts have defaults of their own
        own = defaults(dataclass)
        known = {key: own[key] for key in (*known, *SWIN_KEYS)}
    for key in sorted(set(given) - set(known)):
        has = "no stages; leave it out" if key in SWIN_KEYS else "one side; give --moe-freq instead"
        raise ValueError(f"{flag_of(key)} is given, but {arch} has {has}.")
    options.update({key: getattr(v, "value", v) for key, v in known.items()} | dict(given))
    args = argparse.Namespace(**options)
    ARCH_CONFIG_REGISTRY[arch](args)  # what an older file leaves to the architecture's name
    refuse_options(args)
    refuse_bad_values(read(SwinExpertsConfig, args))
    chosen = _chosen(args, layers)
    if args.moe_pregate:
        refuse_too_far(args.moe_pregate, Counter(layer.side for layer in chosen))
    counts = expert_counts(args.moe_expert_count, len(chosen))
    return {
        layer: _config_of(args, dense_step(model, layer), count)
        for layer, count in zip(chosen, counts, strict=True)
    }


def _take_names_of_twins(state: dict[str, Any]) -> str:
    """Rename what has a twin that knows experts, and return the architecture's."""
    for part, registry in _registries().items():
        name = name_of(state, part)
        if with_experts(name) in registry:
            rename(state, part, with_experts(name))
        elif part == "model":
            raise ValueError(
                f"--input holds a model of the architecture {name}, which has no twin with experts; give a "
                "checkpoint of a transformer_lm, transformer, roberta or bart architecture of fairseq's, "
                "or of swin_v2."
            )
    return name_of(state, "model")


def _registries() -> dict[str, dict[str, Any]]:
    """Return what fairseq has by name, of every part of its options."""
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.optim import OPTIMIZER_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    return {
        "model": ARCH_MODEL_REGISTRY,
        "task": TASK_REGISTRY,
        "criterion": CRITERION_REGISTRY,
        "optimizer": OPTIMIZER_REGISTRY,
    }


def _has_two_sides(layers: list[Layer]) -> bool:
    return {layer.side for layer in layers} == set(SIDES)


def _chosen(args: argparse.Namespace, layers: list[Layer]) -> list[Layer]:
    """Return the layers that get experts."""
    found: list[Layer] = []
    sides = list(dict.fromkeys(layer.side for layer in layers))
    last = getattr(args, "swin_expert_stages", len(sides))
    for side in sides[max(0, len(sides) - last) :]:
        own = getattr(args, f"{side}_moe_freq") if _has_two_sides(layers) else -1
        freq = args.moe_freq if own == -1 else own
        if freq < 0:
            raise ValueError(
                f"--moe-freq of the {side} is {freq}; give a whole number of layers, at least 0."
            )
        of_side = [layer for layer in layers if layer.side == side]
        found += [of_side[i] for i in chosen_layers(range(len(of_side)), freq)]
    if not found:
        raise ValueError(
            f"--moe-freq is {args.moe_freq}, by which none of {len(layers)} layers gets experts; give a "
            "number from 1 to the layers of a side."
        )
    return found


def _config_of(args: argparse.Namespace, ffn: Mapping[str, Tensor], num_experts: int) -> MoEConfig:
    from fairseq_tutel.plugin.flags import layer_config

    hidden_dim, model_dim = ffn["fc1.weight"].shape
    return layer_config(
        args,
        None,
        num_experts,
        model_dim=model_dim,
        hidden_dim=hidden_dim,
        activation=str(getattr(args, "activation_fn", "relu")),
        hidden_layer_norm=LAYER_NORM[0] in ffn,
    )


def _upcycled(
    state: Mapping[str, Any],
    layers: Mapping[Layer, MoEConfig],
    how: Variation,
    copies_optimizer: bool,
) -> dict[str, Any]:
    """Return the MoE checkpoint of a dense one, whose options are those of the MoE model already."""
    dense = state["model"]
    model = _weights(dense, layers, how)
    made = {**state, "model": model}
    if not copies_optimizer:
        return begun_anew(made)
    optimizer = copied_state(dense, state.get("last_optimizer_state"), model, layers)
    *earlier, last = state["optimizer_history"]
    return {
        **made,
        "last_optimizer_state": optimizer,
        "optimizer_history": [*earlier, _with_classes_of_twins(last, made)],
        # An average of earlier weights that has no experts is left out.
        "extra_state": {k: v for k, v in state["extra_state"].items() if not k.startswith("ema")},
    }


def _weights(
    dense: Mapping[str, Tensor], layers: Mapping[Layer, MoEConfig], how: Variation
) -> dict[str, Tensor]:
    """Return the MoE model's state dict, in its order."""
    made: dict[str, Tensor] = {}
    steps = {f"{layer.name}.{DENSE[0]}": (layer, config) for layer, config in layers.items()}
    replaced = {f"{layer.name}.{key}" for layer in layers for key in (*DENSE, *LAYER_NORM)}
    for key, tensor in dense.items():
        if key in steps:
            layer, config = steps[key]
            step = moe_tensors(dense_step(dense, layer), config, layer.step, how)
            made |= {f"{layer.step}.{name}": value for name, value in step.items()}
        elif key not in replaced:
            made[key] = tensor
    return made


def _with_classes_of_twins(entry: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of the history by which fairseq takes the optimizer for the same.

    It compares the names of classes; a wrapper's for half precision stays.
    """
    renamed, registries = dict(entry), _registries()
    for part in ("criterion", "optimizer"):
        twin, key, registry = name_of(state, part), f"{part}_name", registries[part]
        stock = registry.get(twin.removeprefix("moe_"))
        if stock is not None and renamed.get(key) == stock.__name__:
            renamed[key] = registry[twin].__name__
    return renamed


def copied_state(
    dense: Mapping[str, Tensor],
    optimizer: Any,
    moe: Mapping[str, Tensor],
    layers: Mapping[Layer, MoEConfig],
) -> dict[str, Any]:
    """Return an optimizer's state for a MoE model that was made of a dense one.

    What is new, such as gates, has none: optimizers begin it at their first step.

    Args:
        dense: the dense model's state dict.
        optimizer: the state dict of its optimizer, None where there is none.
        moe: the MoE model's state dict.
        layers: those that became MoE layers, with their configurations.

    Raises:
        ValueError: a state that is not by parameter, in the model's order.
    """
    if not isinstance(optimizer, dict) or "state" not in optimizer:
        raise ValueError(f"--input holds no optimizer state; {FIX}.")
    names = trained(list(dense), dense.__getitem__)
    try:
        group = one_group(optimizer, len(names))
        by_name = {
            name: checked(optimizer["state"].get(i, {}), dense[name].shape)
            for i, name in enumerate(names)
        }
    except InexactError as reason:
        raise ValueError(
            f"--input holds an optimizer state that cannot be copied to experts: {reason}; {FIX}."
        ) from None
    for layer, config in layers.items():
        by_name |= _of_layer(dense, by_name, layer, config)
    new_names = _trained(moe, layers)
    return {
        **optimizer,
        "state": {i: by_name[name] for i, name in enumerate(new_names) if by_name.get(name)},
        "param_groups": [{**group, "params": list(range(len(new_names)))}],
    }


def _of_layer(
    dense: Mapping[str, Tensor],
    by_name: Mapping[str, dict[str, Any]],
    layer: Layer,
    config: MoEConfig,
) -> dict[str, dict[str, Any]]:
    """Return the state of a MoE layer's copied tensors by their names."""
    made: dict[str, dict[str, Any]] = {}
    for source, weight in dense_step(dense, layer).items():
        for key, value in by_name[f"{layer.name}.{source}"].items():
            if key == MASTER:  # a weight, and the copies of it may have noise
                continue
            # A step count, and what else is one number for a weight, is that of all its copies.
            is_moment = torch.is_tensor(value) and value.shape == weight.shape
            copied = copies({source: value if is_moment else weight.to("meta")}, config)
            for name, moment in copied.items():
                state = made.setdefault(f"{layer.step}.{name}", {})
                state[key] = moment if is_moment else value
    return made


def _trained(model: Mapping[str, Tensor], layers: Mapping[Layer, MoEConfig]) -> list[str]:
    """Return the names of a MoE model's trained parameters in their order."""
    steps = tuple(f"{layer.step}." for layer in layers)
    own = {
        f"{layer.step}.{key}"
        for layer, config in layers.items()
        for key in trained_tensors(config, layer.step)
    }
    return [
        name
        for name in trained(list(model), model.__getitem__)
        if name in own or not name.startswith(steps)
    ]
