"""Converts a checkpoint of Meta's moe branch of fairseq.

Meta's branch writes a file X-rank-N.pt with the experts of each rank N, and X-shared.pt with all other
weights. The converted weights are bit-identical. Most options have the same names in Meta's branch and
fairseq_tutel; the tables in this file list the others. In shapes, E is the number of experts.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.saved import PARTS, SavedModel
from fairseq_tutel.convert.command import NEW_RUN
from fairseq_tutel.convert.configs import (
    Tensors,
    print_notes,
    refuse_other_rows,
    task_of,
    use_moe_variants,
)
from fairseq_tutel.convert.released.vocabulary import Vocabulary, dictionary
from fairseq_tutel.option import flag_of
from fairseq_tutel.plugin.options import options_of

# Tensor name prefixes that FSDP adds, and the names of weights that FSDP flattened.
WRAPPERS, FLAT = r"(_fsdp_wrapped_module|_fpw_module)\.", r"(^|\.)flat_param"
Options = dict[str, Any]
# For each task of Meta's branch, the stock fairseq task that trains the same kind of model.
TASKS = {
    "streaming_language_modeling": "language_modeling",
    "multilingual_language_modeling": "language_modeling",
}
# For each tensor name in fairseq_tutel, the name in Meta's branch. Both names follow the layer's name. {}
# stands for the expert's ID on its rank.
OUR_GATE, GATE = ".fc1.gate.weight", ".moe_layer.gate.wg.weight"
EXPERTS = {
    f".fc1.experts.{part}_{kind}": f".moe_layer.experts.{{}}.{part}.{kind}"
    for part in ("fc1", "fc2")
    for kind in ("weight", "bias")
}
# With --moe-cmr, a layer also has a dense FFN with fairseq's names, and a CMR gate.
CMR_GATE, CMR_FFN = ".cmr_layer.gate.wg.", r"(.+\.layers\.\d+)\.(fc[12]\.(?:weight|bias))"
BEFORE, BPR = "moe_normalize_gate_prob_before_dropping", "moe_batch_prioritized_routing"
# For each option that both systems have: Meta's default, and a function that converts Meta's value.
OPTIONS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "moe_top1_expert": (False, bool),
    "moe_gating_use_fp32": (False, bool),
    BEFORE: (False, bool),
    BPR: (False, bool),
    "moe_second_expert_policy": ("sampling", str),
    # In Meta's branch, a fraction of at most 0 selects the training capacity; in fairseq_tutel, -1 does.
    "moe_eval_capacity_token_fraction": (0.25, lambda v: v if v > 0 else -1.0),
    **dict.fromkeys(("moe_eom", "moe_fom", "moe_local_drop", "cmr_gate_drop"), (0.0, float)),
    **dict.fromkeys(("moe_cmr", "moe_eval_capacity_max_seqlen"), (False, bool)),
    # Meta's values world_size and num_experts both mean the number of ranks that exchange rows.
    "moe_normalize_expert_grad": (
        "world_size",
        lambda v: "sqrt_world_size" if str(v).startswith("sqrt") else "world_size",
    ),
}
# For each option that only fairseq_tutel has, a function that computes the value from Meta's options.
OURS_ALONE: dict[str, Callable[[Options], Any]] = {
    "moe_top_k": lambda o: 1 if o["moe_top1_expert"] else 2,
    "no_moe_gating_use_fp32": lambda o: not o["moe_gating_use_fp32"],
    "moe_normalize_gate": lambda o: "before" if o[BEFORE] else "after",
    # In Meta's branch, the training capacity has a factor of 1, and counts padding as tokens.
    "moe_capacity_factor": lambda o: 1.0,
    "moe_balance_loss": lambda o: "gshard:1",
}
# For each refused option of Meta's branch, the reason why a model with it cannot be converted.
REFUSED = {
    "alternate_ffn_embed_dim": "its alternate layers are dense FFNs with a different width",
    "alternate_decoder_ffn_embed_dim": "its alternate layers are dense FFNs with a different width",
    "base_layers": "BASE layers are a different kind of experts",
    "scale_fc": "Meta's dense layers have this norm, but Meta's experts do not",
    "scale_heads": "stock fairseq scales attention heads in a different order",
    "scale_heads_inside": "stock fairseq does not scale heads within the attention",
    "scale_resids": "Meta's dense layers have this scale, but Meta's MoE layers do not",
    "alibi": "stock fairseq has no ALiBi",
    "decoder_learned_sinusoidal": "stock fairseq has no learned sinusoidal positions",
    "use_stable_embedding": "stock fairseq has no stable embedding",
    "quant_noise_pq": "fairseq_tutel does not apply quantization noise to experts",
    "quant_noise_scalar": "fairseq_tutel does not apply quantization noise to experts",
    "add_ssl_task_tokens": "fairseq does not add these symbols to a dictionary",
    "finetune_dict_specs": "fairseq does not add these symbols to a dictionary",
}
# An option of Meta's branch, and the symbols that the option adds to dictionaries.
TAGGED, TAGS = "add_data_source_prefix_tags", ("<MINED_DATA>", "<MMT_BT_DATA>", "<SMT_BT_DATA>")
# Task options that name dictionaries, and their values for dictionaries next to the checkpoint.
OWN_DICTIONARIES = {"data": "", "fixed_dictionary": None, "source_dict": None, "target_dict": None}
# For each option of Meta's branch that does not affect the outputs: the behavior of fairseq_tutel.
LEFT_OUT = {
    "no_emb_dropout": "training in fairseq_tutel applies --dropout to embeddings",
    "dummy_a2a": "fairseq_tutel always exchanges rows",
    "cmr_log_lang_gates": "fairseq_tutel logs the mean of the CMR gate over all languages",
}


def run(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert meta`."""
    saved, notes = read(inputs)
    vocabulary = dictionaries(saved, arguments.dictionary)
    vocabulary.write(output.parent)
    saved.write(output)
    print_notes(notes)
    beside = f" and {', '.join(vocabulary.files)}, with the tags of data sources, next to it"
    return beside * bool(vocabulary.files) + NEW_RUN


def inputs_of(arguments: argparse.Namespace) -> list[Path]:
    """Return the paths of all files of a checkpoint from Meta: one file per rank, and the shared file.

    The input is X, X.pt or the name of one of the checkpoint's files.
    """
    path = Path(arguments.input)
    stem = re.sub(r"-(shared|rank-\d+)$", "", path.name.removesuffix(".pt"))
    pattern = re.compile(re.escape(stem) + r"-rank-(\d+)\.pt")
    found = [pattern.fullmatch(beside.name) for beside in path.parent.glob("*")]
    ranks = 1 + max((int(match[1]) for match in found if match), default=0)
    kinds = [*(f"rank-{rank}" for rank in range(ranks)), "shared"]
    return [path.with_name(f"{stem}-{kind}.pt") for kind in kinds]


def read(paths: list[Path]) -> tuple[SavedModel, list[str]]:
    """Load the files of a checkpoint from Meta as one checkpoint, and return it with notes to print.

    Experts are copied to memory. The other weights stay memory-mapped.

    Raises:
        ValueError: a file or weight is missing, corrupt or flattened, or the model cannot be converted.
    """
    saved = SavedModel.open(paths[-1])
    shared, ranks = _weights(saved), [_weights(SavedModel.open(path)) for path in paths[:-1]]
    gates = {name.removesuffix(GATE): t for name, t in shared.items() if name.endswith(GATE)}
    if len(counts := {len(gate) for gate in gates.values()}) != 1:
        what = "whose layers have different numbers of experts" if gates else f"which has no weight …{GATE}"
        _refuse(paths[-1], what, "give a Mixture-of-Experts checkpoint of Meta's branch")
    (num_experts,) = counts
    if num_experts % len(ranks) and len(ranks) % num_experts:
        missing = paths[0].with_name(paths[0].name.replace("-rank-0.", f"-rank-{len(ranks)}."))
        what = f"which does not exist, but {len(ranks)} files cannot hold {num_experts} experts"
        _refuse(missing, what, "give the files of all ranks")
    cmr_layers = {name.partition(CMR_GATE)[0] for name in shared if CMR_GATE in name}
    model: Tensors = {}
    notes: list[str] = []
    for name, tensor in shared.items():
        layer, ffn = name.removesuffix(GATE), re.fullmatch(CMR_FFN, name)
        if layer in gates:
            model[layer + OUR_GATE] = tensor
            for ours, theirs in EXPERTS.items():
                model[layer + ours] = _stacked(paths, ranks, layer + theirs, num_experts, notes)
        elif ffn is not None and ffn[1] in cmr_layers:
            model[f"{ffn[1]}.fc1.beside.dense.{ffn[2]}"] = tensor
        else:
            model[name.replace(CMR_GATE, ".fc1.beside.cmr_gate.")] = tensor
    for path, rank in zip(paths, ranks, strict=False):
        for name in rank:  # No rule above has converted these tensors.
            what = f"which has the weight {name}, but fairseq_tutel's models have no such weight"
            _refuse(path, what, "give a checkpoint without it")
    saved.rename("task", TASKS.get(saved.name("task"), saved.name("task")))
    use_moe_variants(saved)
    saved.restart(model)
    saved.options_of("checkpoint").update(checkpoint_suffix="")  # Meta's files have the suffix -rank-N.
    hidden_dims = {
        name.partition(".")[0]: stack.shape[1]
        for name, stack in model.items()
        if name.endswith(".experts.fc1_weight")
    }
    return saved, notes + translate(saved.options, num_experts, hidden_dims)


def _stacked(
    paths: list[Path], ranks: list[Tensors], name: str, num_experts: int, notes: list[str]
) -> Tensor:
    """Take each expert's tensor out of the ranks' weights, and stack these tensors to [E, …].

    If there are more ranks than experts, each block of E neighboring ranks holds every expert once. If the
    copies of an expert on several ranks differ, `notes` gets a note.
    """
    found: list[Tensor] = []
    local = max(1, num_experts // len(ranks))
    for i in range(max(num_experts, len(ranks))):
        path, theirs = paths[i // local], name.format(i % local)
        tensor = ranks[i // local].pop(theirs, None)
        if tensor is None:
            _refuse(path, f"which lacks the weight {theirs}")
        first = found[i % num_experts] if i >= num_experts else (found or [tensor])[0]
        if first.shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)} instead of {tuple(first.shape)}"
            _refuse(path, f"whose {theirs} has the shape {shapes}")
        if i >= num_experts and not notes and not torch.equal(tensor, first):
            notes.append(
                f"{path} and {paths[i % num_experts]} hold the same expert with different weights "
                f"({theirs}); the weights of the second file are used."
            )
        if i < num_experts:
            found.append(tensor)
    return torch.stack(found)


def dictionaries(saved: SavedModel, given: Path | None = None) -> Vocabulary:
    """Return dictionaries with the symbols `TAGS`, because fairseq, unlike Meta's branch, cannot add them.

    With --add-data-source-prefix-tags, Meta adds the symbols `TAGS` to dictionaries, after the symbols of
    languages. Without --add-data-source-prefix-tags, the returned Vocabulary is empty. The options
    of `saved` are changed in place to name the new dictionaries.

    Args:
        saved: the converted checkpoint.
        given: the path of the original dictionary; by default, the checkpoint's options give this path.

    Raises:
        ValueError: the original dictionary does not exist.
    """
    options = saved.options_of("task")
    if not options.get(TAGGED):
        return Vocabulary({})
    beside = sorted(Path(str(options.get("data")).partition(":")[0]).glob("dict.*.txt"))
    named = [Path(str(options.get("fixed_dictionary"))), *beside]
    file = next((path for path in ([given] if given else named) if path.is_file()), None)
    if file is None:
        raise ValueError(
            f"INPUT was trained with {flag_of(TAGGED)}, but {given or 'its dictionary'} does not exist, so "
            "the symbols of these tags have no numbers; give the dictionary (dict.txt) as --dictionary."
        )
    task = task_of(saved, {**OWN_DICTIONARIES, "fixed_dictionary": str(file)})
    symbols = task.source_dictionary
    for tag in TAGS:
        symbols.add_symbol(tag)
    refuse_other_rows(saved, symbols, symbols)
    for changed in map(saved.options_of, PARTS):
        changed |= {key: value for key, value in OWN_DICTIONARIES.items() if key in changed}
    options |= {"langs": task.langs, "lang_dict": None}
    links = {f"dict.{language}.txt": "dict.txt" for language in task.langs}
    return Vocabulary({"dict.txt": dictionary(symbols.symbols)}, links)


def _weights(file: SavedModel) -> Tensors:
    """Return a file's weights, without the name prefixes that fully sharded data parallelism adds."""
    weights: Tensors = {}
    for key, tensor in file.weights.items():
        name = re.sub(WRAPPERS, "", key.removeprefix("module."))
        if re.search(FLAT, name):
            raise ValueError(
                f"INPUT names {file.path}, which holds flattened weights ({key}) of a sharded training "
                "run; save the checkpoint again with Meta's branch, without --use-sharded-state."
            )
        # Meta's CMR layer refers to the MoE layer, so the file has two names for the MoE layer's weights.
        if not name.endswith(".cmr_layer.lang_idx"):
            weights[name.replace(".cmr_layer.moe_layer.", ".moe_layer.")] = tensor
    return weights


def _refuse(path: Path, what: str, fix: str = "give the files of one training run") -> NoReturn:
    raise ValueError(f"INPUT names {path}, {what}; {fix}.")


def translate(options: Options, experts: int, hidden_dims: dict[str, int]) -> list[str]:
    """Convert options of Meta's branch to fairseq_tutel's, in place, and return notes on changes.

    Args:
        options: options of Meta's model.
        experts: the number of experts.
        hidden_dims: the hidden dimension of the encoder's experts and of the decoder's experts.

    Raises:
        ValueError: fairseq_tutel lacks an option, and the outputs would change without the option.
    """
    for key, reason in REFUSED.items():
        if options.get(key):
            raise ValueError(
                f"the model was trained with {flag_of(key)} {options[key]}: {reason}; give a model without "
                "this option."
            )
    notes = [
        f"{flag_of(key)} {value} has no counterpart in fairseq_tutel: {reason}."
        for key, reason in LEFT_OUT.items()
        if (value := options.pop(key, None))
    ]
    translates = "encoder_layers" in options
    if translates and not options.get("use_moe_pad_mask"):
        notes.append(
            "without --use-moe-pad-mask Meta routes padding too, which uses slots of experts; "
            "fairseq_tutel never routes padding."
        )
    # An encoder-decoder's options include those of its criterion and task.
    known = {option.key for part in ("model", "task", "criterion") for option in options_of(part)}
    notes += [
        f"{flag_of(key)} {value} is not an option of fairseq_tutel; it stays in the file without effect."
        for key, value in options.items()
        if key.startswith("moe_") and value and key not in known
    ]
    if options.get("moe_top1_expert"):  # Meta's top-1 gate ignores these two options.
        options |= {"moe_second_expert_policy": "all", BPR: False}
    for key, (default, ours) in OPTIONS.items():
        options[key] = ours(default if options.get(key) is None else options[key])
    options.update({key: ours(options) for key, ours in OURS_ALONE.items()})
    if (policy := options["moe_second_expert_policy"]) != "all":
        notes.append(
            f"--moe-second-expert-policy {policy}: Meta draws the second expert at random in evaluation "
            "too; fairseq_tutel uses the second-best expert in evaluation."
        )
    dense = all(options.get(f"{side}_ffn_embed_dim") == dim for side, dim in hidden_dims.items())
    # In Meta's branch, the larger of --moe-freq and --encoder-moe-freq (or --decoder-moe-freq) applies.
    # In fairseq_tutel, --encoder-moe-freq and --decoder-moe-freq have priority.
    common = int(options.get("moe_freq") or 0)
    keys = ("encoder_moe_freq", "decoder_moe_freq")
    own = {key: max(int(options.pop(key, None) or 0), common) for key in keys}
    options |= {"moe_freq": common, **own} if translates else {"moe_freq": own["decoder_moe_freq"]}
    options["moe_expert_count"] = str(experts)
    options["moe_expert_ffn_dim"] = 0 if dense else next(iter(hidden_dims.values()))
    return notes
