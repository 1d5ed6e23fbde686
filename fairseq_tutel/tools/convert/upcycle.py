"""convert upcycle: make a Mixture-of-Experts checkpoint of a dense one, each expert a copy.

Every chosen layer's feed-forward network becomes experts, all of which begin as that network, and a gate
that is drawn anew (Komatsuzaki et al. 2022, Sparse Upcycling). With --moe-expert-ffn-dim a whole part of
the network's width, an expert is such a part (He et al. 2024): as many experts for a token as parts then
cost what the dense layer costs. Where the weights of a token's experts sum to 1, the model computes
what the dense one did; the tool says whether it does. Without --copy-optimizer-state a training begins
anew with it: give it to --finetune-from-model.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from fairseq_tutel import plugin
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.tools import one_file
from fairseq_tutel.tools.convert.files import load, write
from fairseq_tutel.tools.convert.layers import Layer
from fairseq_tutel.tools.convert.moe_file import counts_text
from fairseq_tutel.tools.convert.options import name_of
from fairseq_tutel.tools.convert.upcycle_layer import Variation, differences
from fairseq_tutel.tools.convert.upcycle_model import give_options, upcycled
from fairseq_tutel.tools.late_parser import LateParser


def add_to(kinds: Any) -> None:
    """Add the conversion to the command line."""
    parser: LateParser = kinds.add_parser(
        "upcycle",
        help="make a MoE checkpoint of a dense one, each expert a copy of its feed-forward network",
        description=__doc__,
    )
    one_file.add_to(parser, "the dense checkpoint")
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of gates and all else that is drawn [1]"
    )
    parser.add_argument(
        "--perturb",
        type=float,
        default=0.0,
        metavar="STD",
        help="gaussian noise on the experts' weights, in standard deviations of the matrix [0]",
    )
    parser.add_argument(
        "--reinitialize",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of each expert's hidden units to draw anew by the statistics of the old ones, other "
        "units in each expert (Drop-Upcycling, Nakamura et al. 2025, who take 0.5) [0]",
    )
    parser.add_argument(
        "--gate-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply the gates' drawn weights; the smaller, the more even a token's probabilities [1]",
    )
    parser.add_argument(
        "--copy-optimizer-state",
        action="store_true",
        help="keep the optimizer's moments, each expert's those of its network, and the place in the data, "
        "for a training that goes on by --restore-file",
    )
    parser.set_defaults(convert=run)
    parser.late = _add_model_options


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    plugin.register()
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    from fairseq_tutel.plugin.flags import EncoderDecoderOptions

    group = parser.add_argument_group("the experts, as for fairseq-train; saved with the model")
    gen_parser_from_dataclass(group, EncoderDecoderOptions(), delete_default=True, with_prefix="")


def run(arguments: argparse.Namespace) -> None:
    """Convert as the command line says, and say what the result computes.

    Raises:
        ValueError: it cannot be done.
    """
    path, output = one_file.paths(arguments)
    how = _variation(arguments)
    state = load(path, "--input")
    layers = give_options(state, _given_model_options(arguments))
    write(upcycled(state, layers, how, arguments.copy_optimizer_state), output)
    print(f"wrote {output}: {name_of(state, 'model')}, {_described(layers)}")
    print(_first_output(layers, how))


def _variation(arguments: argparse.Namespace) -> Variation:
    for flag, holds, fix in (
        ("perturb", lambda v: 0 <= v < 100, "give a finite number, at least 0"),
        ("reinitialize", lambda v: 0 <= v <= 1, "give a number from 0 to 1"),
        ("gate_scale", lambda v: 0 < v < 1e6, "give a number above 0"),
    ):
        value = getattr(arguments, flag)
        if not holds(value):
            raise ValueError(f"--{flag.replace('_', '-')} is {value:g}; {fix}.")
    return Variation(
        seed=arguments.seed,
        perturb=arguments.perturb,
        reinitialize=arguments.reinitialize,
        gate_scale=arguments.gate_scale,
    )


def _given_model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the experts' options that the command line gives, by their keys."""
    from fairseq_tutel.plugin.flags import EncoderDecoderOptions, defaults

    values = {key: getattr(arguments, key) for key in defaults(EncoderDecoderOptions)}
    # A flag that is not given is None or, of a switch, False; 0 is a value.
    return {key: value for key, value in values.items() if value is not None and value is not False}


def _described(layers: Mapping[Layer, MoEConfig]) -> str:
    """Return the layers with experts and what these are, in a line."""
    counts = counts_text([config.num_experts for config in layers.values()])
    labels = ", ".join(layer.label for layer in layers)
    first = next(iter(layers.values()))
    return f"{counts} experts of {first.hidden_dim}, top-{first.top_k}, in {labels}"


def _first_output(layers: Mapping[Layer, MoEConfig], how: Variation) -> str:
    """Return the sentence that says whether the model computes what the dense one did."""
    reasons = dict.fromkeys(
        reason for config in layers.values() for reason in differences(config, how)
    )
    if not reasons:
        return "its first output is the dense model's, to rounding"
    return f"its first output is not the dense model's: {'; '.join(reasons)}"
