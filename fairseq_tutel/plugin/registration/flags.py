"""Defines the command-line flags and hydra keys of this package.

Every MoE model has the options `ModelOptions`, every task `SystemOptions` (parallelism, memory, saving),
and every MoE criterion `GateLossOptions`. `layer_config` makes a MoEConfig from model and task options.
"""

import dataclasses
import difflib
import logging
from collections.abc import Iterable
from typing import Any

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from fairseq_tutel.files import shown
from fairseq_tutel.moe.config import LAYER, MoEConfig
from fairseq_tutel.option import Option, options_in, plain, read, refuse_bad_values
from fairseq_tutel.plugin.options import BY_OWNER, CriterionConfig, ModelConfig, SidesConfig, options_of
from fairseq_tutel.plugin.training.options import TaskConfig

logger = logging.getLogger(__name__)


def made(name: str, options: Iterable[Option], base: type = FairseqDataclass) -> type:
    """Make a fairseq dataclass called `name`, with one field for each of the given options."""
    made = []
    for item in options:
        kind = ChoiceEnum(list(item.choices)) if item.choices else item.type
        text = f"{item.text} [default: {item.shown_default}]".replace("%", "%%")
        made.append((item.key, kind, dataclasses.field(default=item.default, metadata={"help": text})))
    return dataclasses.make_dataclass(name, made, bases=(base,), namespace={"__module__": __name__})


OF_LAYERS = [item for item in LAYER.values() if item.of == "model"]
ModelOptions = made("ModelOptions", [*options_in(ModelConfig), *OF_LAYERS])
EncoderDecoderOptions = made("EncoderDecoderOptions", options_in(SidesConfig), ModelOptions)
SystemOptions = made("SystemOptions", options_of("task"))
GateLossOptions = made("GateLossOptions", options_in(CriterionConfig))


def defaults(options: type) -> dict[str, Any]:
    """Return the default value of every field of an options dataclass, by field name."""
    return {f.name: f.default for f in dataclasses.fields(options) if f.name != "_name"}


def refuse_misspelt(overrides: dict[str, Any]) -> None:
    """Raise an error if --model-overrides has a misspelled key, because fairseq would ignore the key."""
    known = {item.key for owner in BY_OWNER for item in options_of(owner)}
    for key in overrides.keys() - known:
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if close:
            raise ValueError(f"{key} is not an option (--model-overrides); did you mean {close[0]}?")


def drop_is_moe(argv: list[str]) -> None:
    """Remove --is-moe from a fairseq command line, in place.

    Meta's evaluation commands need the flag --is-moe, but this package recognizes MoE checkpoints itself.
    The parser of fairseq-eval-lm cannot be extended, so --is-moe is removed from sys.argv.
    """
    if "--is-moe" in argv and any(word.split("=")[0] == "--user-dir" for word in argv):
        argv.remove("--is-moe")
        logger.info("--is-moe is not needed: checkpoints of MoE models are recognized")


def fill_in(args: Any, options: type) -> None:
    """Add the options that a model's arguments lack, with their default values, in place."""
    for key, value in defaults(options).items():
        setattr(args, key, getattr(args, key, value))


def expert_counts(text: str, num_layers: int) -> list[int]:
    """Parse --moe-expert-count; return the number of experts of each of `num_layers` MoE layers."""
    try:
        counts = [int(part) for part in str(text).split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ValueError(
            f"--moe-expert-count is {shown(text)}; give a number of at least 1, such as 8, or one number "
            'for each MoE layer, such as "8,8,16".'
        )
    if len(counts) == 1:
        return counts * num_layers
    if len(counts) != num_layers:
        raise ValueError(
            f"--moe-expert-count is {shown(text)}, which has {len(counts)} numbers, but the model has "
            f"{num_layers} MoE layers; give one number or {num_layers} numbers."
        )
    return counts


def layer_config(model_cfg: Any, task_cfg: Any, num_experts: int, **layer: Any) -> MoEConfig:
    """Return the MoEConfig of one layer from the configurations of its model and its task.

    A `model_cfg` from a checkpoint may lack newer keys. `layer` has properties of the stock layer, such as
    model_dim, hidden_dim and activation.
    """
    model, task = read(ModelConfig, model_cfg), read(TaskConfig, task_cfg)
    refuse_bad_values(model)
    cfgs = {"model": model_cfg, "task": task_cfg}
    with_flag = [item for item in LAYER.values() if item.of]
    values = {each.name: plain(getattr(cfgs[each.of], each.key, each.default)) for each in with_flag}
    for config in (model, task):
        for older in options_in(type(config)):
            if older.same_as and getattr(config, older.name):
                name, value = older.same_as
                if values[name] not in (value, LAYER[name].default):
                    both = f"{older.flag} and {LAYER[name].flag} {values[name]}"
                    raise ValueError(f"{both} are both given; remove one of them.")
                values[name] = value
    if model.moe_gating_use_fp32 and model.no_moe_gating_use_fp32:
        raise ValueError("--moe-gating-use-fp32 and --no-moe-gating-use-fp32 are both given; remove one.")
    values["gate_fp32"] = not model.no_moe_gating_use_fp32
    layer["hidden_dim"] = model.moe_expert_ffn_dim or layer["hidden_dim"]
    return MoEConfig(num_experts=num_experts, **values, **layer)
