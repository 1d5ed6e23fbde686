"""Converts a checkpoint of Meta's moe branch of fairseq.

Meta writes X-shared.pt, and a file X-rank-N.pt with the experts of each rank. Weights keep their bits. Most
options have the same names in both systems; the tables below hold the differences. E is the number of
experts.
"""

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from fairseq_tutel.checkpoint.saved import DENSE, PARTS, SavedModel
from fairseq_tutel.convert.command import NEW_RUN
from fairseq_tutel.convert.configs import (
    Tensors,
    print_notes,
    refuse_other_rows,
    task_of,
    use_moe_variants,
)
from fairseq_tutel.convert.released.vocabulary import Vocabulary, dictionary
from fairseq_tutel.moe.option_table import options_of
from fairseq_tutel.option import flag_of
from fairseq_tutel.plugin.install import chosen_layers

# Name prefixes that fully sharded data parallelism adds, and its name for flattened weights.
WRAPPERS, FLAT = r"(_fsdp_wrapped_module|_fpw_module)\.", r"(^|\.)flat_param"
Options = dict[str, Any]
# Meta's task -> the stock fairseq task that trains the same kind of model.
TASKS = {
    "streaming_language_modeling": "language_modeling",
    "multilingual_language_modeling": "language_modeling",
}
SHARED = -1  # index of the file with all weights that do not belong to experts
# Our tensor name -> Meta's tensor name, both after the layer's name; {} is the expert's ID on its rank.
OUR_GATE, GATE = ".fc1.gate.weight", ".moe_layer.gate.wg.weight"
EXPERTS = {
    f".fc1.experts.{part}_{kind}": f".moe_layer.experts.{{}}.{part}.{kind}"
    for part in ("fc1", "fc2")
    for kind in ("weight", "bias")
}
# With --moe-cmr, the layer also has a dense FFN, under the names of stock fairseq, and a gate.
CMR_GATE, CMR_FFN = ".cmr_layer.gate.wg.", r"(.+\.layers\.\d+)\.(fc[12]\.(?:weight|bias))"
# Weights of the shared file that can be converted: gates, and all weights of stock fairseq.
STOCK = re.compile(
    r"(?:encoder|decoder)\.(?:"
    r"version|embed_tokens\..+|embed_positions\.(?:weight|_float_tensor)"
    r"|(?:layernorm_embedding|layer_norm)\.(?:weight|bias)"
    r"|(?:project_in_dim|project_out_dim|output_projection)\.weight|adaptive_softmax\..+"
    r"|layers\.\d+\.(?:(?:self_attn|encoder_attn)\.(?:(?:[kqv]|out)_proj\.(?:weight|bias)|bias_[kv])"
    r"|(?:self_attn_layer_norm|encoder_attn_layer_norm|final_layer_norm|fc1|fc2)\.(?:weight|bias)"
    r"|moe_layer\.gate\.wg\.weight|cmr_layer\.gate\.wg\.(?:weight|bias))"
    r")|decoder\.layers\.\d+\.attn_ln\.(?:weight|bias)"
)
BEFORE, BPR = "moe_normalize_gate_prob_before_dropping", "moe_batch_prioritized_routing"
# Option that both systems have -> Meta's default, and a function from Meta's value to our value.
OPTIONS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "moe_top1_expert": (False, bool),
    "moe_gating_use_fp32": (False, bool),
    BEFORE: (False, bool),
    BPR: (False, bool),
    "moe_second_expert_policy": ("sampling", str),
    # A fraction of at most 0 means the training capacity in Meta's branch; 0 means none here.
    "moe_eval_capacity_token_fraction": (0.25, lambda v: v if v > 0 else -1.0),
    **dict.fromkeys(("moe_eom", "moe_fom", "moe_local_drop", "cmr_gate_drop"), (0.0, float)),
    **dict.fromkeys(("moe_cmr", "moe_eval_capacity_max_seqlen"), (False, bool)),
    # Meta has two names for the same number: the number of ranks that exchange rows.
    "moe_normalize_expert_grad": (
        "world_size",
        lambda v: "sqrt_world_size" if str(v).startswith("sqrt") else "world_size",
    ),
}
# Option that only fairseq_tutel has -> function from Meta's options to its value.
OURS_ALONE: dict[str, Callable[[Options], Any]] = {
    "moe_top_k": lambda o: 1 if o["moe_top1_expert"] else 2,
    "no_moe_gating_use_fp32": lambda o: not o["moe_gating_use_fp32"],
    "moe_normalize_gate": lambda o: "before" if o[BEFORE] else "after",
    # Meta's training capacity has a factor of 1 and includes padding.
    "moe_capacity_factor": lambda o: 1.0,
    "moe_balance_loss": lambda o: "gshard:1",
}
# Meta's option -> the reason why a model with this option cannot be converted.
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
# An option of Meta's, and the symbols that it adds to dictionaries.
TAGGED, TAGS = "add_data_source_prefix_tags", ("<MINED_DATA>", "<MMT_BT_DATA>", "<SMT_BT_DATA>")
# Options of the task that name dictionaries -> their values for dictionaries next to the checkpoint.
OWN_DICTIONARIES = {"data": "", "fixed_dictionary": None, "source_dict": None, "target_dict": None}
# Meta's option -> what changes without this option; the outputs stay the same.
LEFT_OUT = {
    "no_emb_dropout": "training in fairseq_tutel applies --dropout to embeddings",
    "dummy_a2a": "fairseq_tutel always exchanges rows",
    "cmr_log_lang_gates": "fairseq_tutel logs the mean of the CMR gate over all languages",
}


class Row(NamedTuple):
    """Maps a weight in Meta's files to its name in fairseq_tutel; a layer's experts share one name."""

    file: int
    theirs: str
    ours: str
    expert: int | None


def run(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert meta`."""
    saved, notes = read(inputs)
    vocabulary = dictionaries(saved, arguments.dictionary)
    for name in (*vocabulary.files, *vocabulary.links):
        text, file = vocabulary.files.get(vocabulary.links.get(name, name)), output.parent / name
        if file.exists() and file.read_text() != text:
            raise ValueError(f"{file} is another dictionary; give an --output in another folder.")
    vocabulary.write(output.parent)
    saved.write(output)
    print_notes(notes)
    beside = f" and {', '.join(vocabulary.files)}, with the tags of data sources, next to it"
    return beside * bool(vocabulary.files) + NEW_RUN


def inputs_of(arguments: argparse.Namespace) -> list[Path]:
    """Return the paths of all files of a checkpoint from Meta: one per rank, then the shared file.

    The input is X, X.pt or the name of one of the files.
    """
    path = Path(arguments.input)
    stem = re.sub(r"-(shared|rank-\d+)$", "", path.name.removesuffix(".pt"))
    pattern = re.compile(re.escape(stem) + r"-rank-(\d+)\.pt")
    found = [pattern.fullmatch(beside.name) for beside in path.parent.glob("*")]
    ranks = 1 + max((int(match[1]) for match in found if match), default=0)
    kinds = [*(f"rank-{rank}" for rank in range(ranks)), "shared"]
    return [path.with_name(f"{stem}-{kind}.pt") for kind in kinds]


def read(paths: list[Path]) -> tuple[SavedModel, list[str]]:
    """Load the files of a checkpoint from Meta as one checkpoint; also return notes on what changed.

    Experts are copied to memory once. All other weights stay memory-mapped.

    Raises:
        ValueError: a file or weight is missing, corrupt or flattened, or the model cannot be converted.
    """
    saved = SavedModel.open(paths[SHARED])
    weights = [_weights(file) for file in (*map(SavedModel.open, paths[:SHARED]), saved)]
    num_experts, rows = _checked(paths, weights)
    _refuse_other_cmr(paths[SHARED], weights[SHARED], bool(saved.options.get("moe_cmr")))
    sources: dict[str, list[Row]] = {}  # for each of our weights: one row, or one per copy of each expert
    for row in rows:
        sources.setdefault(row.ours, []).append(row)
    model: Tensors = {}
    notes: list[str] = []
    for name, own in sources.items():
        tensors = [weights[row.file][row.theirs] for row in own]
        for i, (row, tensor) in enumerate(zip(own, tensors, strict=True)):
            first = i % num_experts
            if (shape := tuple(tensor.shape)) != (expected := tuple(tensors[0].shape)):
                _refuse(paths[row.file], f"whose {row.theirs} has the shape {shape} instead of {expected}")
            if first != i and not notes and not torch.equal(tensor, tensors[first]):
                notes.append(
                    f"{paths[row.file]} and {paths[own[first].file]} hold the same expert with different "
                    f"weights ({row.theirs}); the weights of the second file are used."
                )
        model[name] = tensors[0] if own[0].expert is None else torch.stack(tensors[:num_experts])
    saved.rename("task", TASKS.get(saved.name("task"), saved.name("task")))
    use_moe_variants(saved)
    saved.restart(model)
    saved.options_of("checkpoint").update(checkpoint_suffix="")  # it was -rank-N
    hidden_dims = {
        name.partition(".")[0]: stack.shape[1]
        for name, stack in model.items()
        if name.endswith(".experts.fc1_weight")
    }
    notes += translate(saved.options, num_experts, hidden_dims)
    _refuse_other_layers(saved)
    return saved, notes


def dictionaries(saved: SavedModel, given: Path | None = None) -> Vocabulary:
    """Return the dictionaries to write next to the model, because fairseq cannot extend the original ones.

    With --add-data-source-prefix-tags, Meta adds the symbols `TAGS` to them, after those of the languages.
    Without this option, there is nothing to write. The options of `saved` change, in place, so that the
    new dictionaries are used.

    Args:
        saved: the converted checkpoint.
        given: the original dictionary; by default the one that the checkpoint's options name.

    Raises:
        ValueError: the original dictionary does not exist, or is another model's.
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
    """Return a file's weights without the name prefixes that fully sharded data parallelism adds."""
    weights: Tensors = {}
    for key, tensor in file.weights.items():
        name = re.sub(WRAPPERS, "", key.removeprefix("module."))
        if re.search(FLAT, name):
            raise ValueError(
                f"INPUT names {file.path}, which holds flattened weights ({key}) of a sharded training "
                "run; save the checkpoint again with Meta's branch, without --use-sharded-state."
            )
        # Meta's CMR layer refers to the MoE layer, so a file names its weights twice.
        if not name.endswith(".cmr_layer.lang_idx"):
            weights[name.replace(".cmr_layer.moe_layer.", ".moe_layer.")] = tensor
    return weights


def _refuse(path: Path, what: str, fix: str = "give the files of one training run") -> NoReturn:
    raise ValueError(f"INPUT names {path}, {what}; {fix}.")


def _checked(paths: list[Path], weights: list[Tensors]) -> tuple[int, list[Row]]:
    """Return the number of experts and a `Row` for each weight; raise ValueError for unexpected weights."""
    *ranks, shared = weights
    gates = {name.removesuffix(GATE): t for name, t in shared.items() if name.endswith(GATE)}
    if not gates:
        what = f"which has no experts (no weight …{GATE})"
        _refuse(paths[SHARED], what, "use a dense checkpoint without conversion")
    if len({gate.shape[0] for gate in gates.values()}) > 1:
        what = "whose layers have different numbers of experts, which Meta's options cannot express"
        _refuse(paths[SHARED], what)
    layer, experts = next((layer, gate.shape[0]) for layer, gate in gates.items())
    found = (re.search(r"\.moe_layer\.experts\.(\d+)\.", name) for rank in ranks for name in rank)
    local = len({match[1] for match in found if match})
    if (held := local * len(ranks)) < experts or held % experts:
        missing = paths[0].with_name(paths[0].name.replace("-rank-0.", f"-rank-{len(ranks)}."))
        what = f"which does not exist: {layer} has {experts} experts, {local} in each file"
        _refuse(missing, what, "give the files of all ranks")
    if local > 1 and held > experts:
        _refuse(paths[-2], f"but with this file {layer} would have {held} experts instead of {experts}")
    rows = table(shared, experts, len(ranks))
    for row in rows:
        if row.theirs not in weights[row.file]:
            _refuse(paths[row.file], f"which lacks the weight {row.theirs}")
    known = {(row.file, row.theirs) for row in rows}
    for file in range(SHARED, len(ranks)):
        for name in weights[file]:
            if (file, name) not in known or (file == SHARED and not STOCK.fullmatch(name)):
                what = f"which has the weight {name}, but fairseq_tutel's models have no such weight"
                _refuse(paths[file], what, "give a checkpoint without it")
    return experts, rows


def _refuse_other_cmr(path: Path, shared: Tensors, has_cmr: bool) -> None:
    """Raise ValueError if a file's weights of CMR layers do not fit its option --moe-cmr."""
    layers = [name.removesuffix(GATE) for name in shared if name.endswith(GATE)]
    own = (f"{CMR_GATE}weight", f"{CMR_GATE}bias", *(f".{name}" for name in DENSE))
    lacking = sorted({layer + name for layer in layers for name in own} - shared.keys())
    if has_cmr and lacking:
        _refuse(path, f"which lacks the weight {lacking[0]}")
    if given := sorted(name for name in shared if CMR_GATE in name and not has_cmr):
        _refuse(path, f"which has the weight {given[0]}, but its options lack --moe-cmr")


def _refuse_other_layers(saved: SavedModel) -> None:
    """Raise ValueError if the weights have experts in different layers than the options select."""
    for side in dict.fromkeys(layer.side for layer in saved.layers):
        layers = [layer for layer in saved.layers if layer.side == side]
        freq = saved.options.get(f"{side}_moe_freq", saved.options["moe_freq"])
        expected = chosen_layers(range(len(layers)), freq)
        found = [layer.index for layer in layers if layer.has_experts]
        if found != expected:
            raise ValueError(
                f"INPUT has experts in the {side} layers {found}, but its options (--moe-freq {freq}) "
                f"select the layers {expected}; give the files of one training run."
            )


def table(names: Iterable[str], experts: int, ranks: int) -> list[Row]:
    """Return a list with a `Row` for each weight in the files of Meta's checkpoint, in model order.

    `names` are the weights of the shared file. If there are more ranks than experts, each block of E
    neighboring ranks holds all experts once.
    """
    names = list(names)
    cmr_layers = {name.partition(CMR_GATE)[0] for name in names if CMR_GATE in name}
    rows, local = [], max(1, experts // ranks)
    for name in names:
        layer = name.removesuffix(GATE)
        if layer == name:
            ours = name.replace(CMR_GATE, ".fc1.beside.cmr_gate.")
            ffn = re.fullmatch(CMR_FFN, name)
            if ffn is not None and ffn[1] in cmr_layers:
                ours = f"{ffn[1]}.fc1.beside.dense.{ffn[2]}"
            rows.append(Row(SHARED, name, ours, None))
            continue
        rows.append(Row(SHARED, name, layer + OUR_GATE, None))
        rows += [
            Row(i // local, layer + theirs.format(i % local), layer + ours, i % experts)
            for i in range(max(experts, ranks))
            for ours, theirs in EXPERTS.items()
        ]
    return rows


def translate(options: Options, experts: int, hidden_dims: dict[str, int]) -> list[str]:
    """Convert the options of Meta's model to fairseq_tutel's, in place; return notes on what changed.

    Args:
        options: options of Meta's model.
        experts: number of experts.
        hidden_dims: hidden dimension of the experts of the encoder and of the decoder.

    Raises:
        ValueError: an option has no counterpart, and the outputs would change without it.
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
    if options.get("moe_top1_expert"):  # Meta's top-1 gate ignores both
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
    # In fairseq_tutel, the option of the encoder or decoder has priority.
    common = int(options.get("moe_freq") or 0)
    keys = ("encoder_moe_freq", "decoder_moe_freq")
    own = {key: max(int(options.pop(key, None) or 0), common) for key in keys}
    options |= {"moe_freq": common, **own} if translates else {"moe_freq": own["decoder_moe_freq"]}
    options["moe_expert_count"] = str(experts)
    options["moe_expert_ffn_dim"] = 0 if dense else next(iter(hidden_dims.values()))
    return notes
