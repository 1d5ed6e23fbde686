"""`convert meta` converts every weight and option, and raises an error for unsupported input."""

import argparse
import shutil

import meta_format
import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask
from meta_format import D, H, Meta
from tool_in_process import convert, refusal

from fairseq_tutel.convert.meta import TAGS, inputs_of, read, translate

WORDS = 24


def load(path):
    return torch.load(path, weights_only=False)


def converted(folder, meta=None, **fields):
    """Convert a checkpoint in Meta's format, and return the printed text and the new checkpoint."""
    meta = meta or Meta(WORDS, **fields)
    meta_format.write(meta, folder / "best")
    printed = convert("meta", "--input", folder / "best.pt", "--output", folder / "ours.pt")
    return printed, load(folder / "ours.pt")


def expected_weight(meta, name):
    """Compute the expected value of a converted weight from Meta's weights."""
    layer, found, rest = name.partition(".fc1.")
    shapes = dict(meta.names())
    if not found or layer not in meta.moe_layers():
        return meta_format.weight(meta, name, shapes[name])
    if rest.startswith("beside.dense."):
        name = f"{layer}.{rest.removeprefix('beside.dense.')}"
        return meta_format.weight(meta, name, shapes[name])
    if rest.startswith("beside.cmr_gate."):
        name = rest.replace("beside.cmr_gate.", f"{layer}.cmr_layer.gate.wg.")
        return meta_format.weight(meta, name, shapes[name])
    if rest == "gate.weight":
        key = f"{layer}.moe_layer.gate.wg.weight"
        return meta_format.weight(meta, key, (meta.num_experts, D))
    tensor = rest.removeprefix("experts.").replace("_", ".")
    shape = dict(meta_format.ffn("x"))[f"x.{tensor}"]
    experts = [f"{layer}.moe_layer.experts.{e}.{tensor}" for e in range(meta.num_experts)]
    return torch.stack([meta_format.drawn(key, shape) for key in experts])


SIZES = {
    "4 experts on 2 ranks": {},
    "4 on 4": {"ranks": 4},
    "4 on 1": {"ranks": 1},
    "2 on 4, every other layer": {"num_experts": 2, "ranks": 4, "moe_freq": 2},
    "translation": {"translates": True},
    "CMR, every other layer": {"moe_freq": 2, "options": {"moe_cmr": True}},
    "CMR, translation": {"translates": True, "options": {"moe_cmr": True}},
}


@pytest.mark.parametrize("case", SIZES)
def test_convert_meta_keeps_every_weight_but_no_training_state(case, tmp_path):
    meta = Meta(WORDS, **SIZES[case])
    _, state = converted(tmp_path, meta)
    for name, tensor in state["model"].items():
        assert torch.equal(tensor, expected_weight(meta, name)), name
    layers = {name.partition(".fc1.")[0] for name in state["model"] if ".fc1.gate." in name}
    assert layers == set(meta.moe_layers())
    assert "last_optimizer_state" not in state
    assert state["extra_state"]["train_iterator"]["iterations_in_epoch"] == 0


@pytest.mark.parametrize("alone", [False, True], ids=["cfg", "args"])
def test_convert_meta_replaces_the_options_of_a_translation_model_in_args_or_cfg(alone, tmp_path):
    _, state = converted(tmp_path, translates=True, args_alone=alone)
    flat = vars(state["args"] if alone else state["cfg"]["model"])
    assert (flat["arch"], flat["task"], flat["optimizer"]) == (
        "moe_transformer", "moe_translation", "moe_adam",
    )  # fmt: skip
    assert (flat["moe_freq"], flat["encoder_moe_freq"], flat["decoder_moe_freq"]) == (1, 1, 1)


OPTIONS = [
    ({}, {"moe_top_k": 2, "moe_capacity_factor": 1.0, "moe_balance_loss": "gshard:1"}),
    ({"moe_top1_expert": True}, {"moe_top_k": 1, "moe_top1_expert": True}),
    ({"moe_gating_use_fp32": True}, {"no_moe_gating_use_fp32": False}),
    ({"moe_gating_use_fp32": False}, {"no_moe_gating_use_fp32": True}),
    ({"moe_normalize_gate_prob_before_dropping": True}, {"moe_normalize_gate": "before"}),
    ({"moe_normalize_gate_prob_before_dropping": False}, {"moe_normalize_gate": "after"}),
    ({"moe_eval_capacity_token_fraction": 0.05}, {"moe_eval_capacity_token_fraction": 0.05}),
    ({"moe_eval_capacity_token_fraction": None}, {"moe_eval_capacity_token_fraction": 0.25}),
    ({"moe_eval_capacity_token_fraction": 0.0}, {"moe_eval_capacity_token_fraction": -1.0}),
    ({"moe_eval_capacity_token_fraction": -1.0}, {"moe_eval_capacity_token_fraction": -1.0}),
    ({"moe_batch_prioritized_routing": True}, {"moe_batch_prioritized_routing": True}),
    (
        {"moe_batch_prioritized_routing": True, "moe_top1_expert": True},
        {"moe_batch_prioritized_routing": False},
    ),
    ({"moe_normalize_expert_grad": "world_size"}, {"moe_normalize_expert_grad": "world_size"}),
    ({"moe_normalize_expert_grad": "sqrt_num_experts"}, {"moe_normalize_expert_grad": "sqrt_world_size"}),
    ({"decoder_ffn_embed_dim": 64}, {"moe_expert_ffn_dim": H}),
    ({"moe_eom": 0.2, "moe_fom": None}, {"moe_eom": 0.2, "moe_fom": 0.0}),
    ({"moe_local_drop": 0.1, "moe_cmr": True}, {"moe_local_drop": 0.1, "moe_cmr": True}),
    ({"cmr_gate_drop": 0.3}, {"cmr_gate_drop": 0.3, "moe_cmr": False}),
    ({"moe_eval_capacity_max_seqlen": True}, {"moe_eval_capacity_max_seqlen": True}),
]


@pytest.mark.parametrize(("given", "expected"), OPTIONS, ids=str)
def test_convert_meta_translates_meta_options_to_plugin_options(given, expected):
    options = Meta(WORDS, options=given).model_options()
    translate(options, 4, {"decoder": H})
    assert expected.items() <= options.items()


NOTED = {
    "--moe-second-expert-policy sampling: Meta draws the second expert at random":
        {"moe_second_expert_policy": "sampling"},
    "--cmr-log-lang-gates True has no counterpart": {"cmr_log_lang_gates": True},
    "without --use-moe-pad-mask": {"encoder_layers": 1},
    "--moe-of-tomorrow 3 is not an option of fairseq_tutel": {"moe_of_tomorrow": 3},
}  # fmt: skip


def test_convert_meta_prints_a_note_only_for_options_that_differ_in_the_plugin(tmp_path):
    printed, _ = converted(tmp_path, ranks=4)
    assert printed == f"wrote {tmp_path / 'ours.pt'}; start a new training run from it\n"
    for sentence, options in NOTED.items():
        given = Meta(WORDS, options=options).model_options()
        assert any(note.startswith(sentence) for note in translate(given, 4, {"decoder": H}))


def test_convert_meta_finds_all_files_of_a_checkpoint_from_the_name_of_any_file(tmp_path):
    files = meta_format.write(Meta(WORDS), tmp_path / "best")
    for name in ("best", "best.pt", "best-shared.pt", "best-rank-1.pt"):
        assert {*inputs_of(argparse.Namespace(input=tmp_path / name))} == {*files}


def test_convert_meta_removes_the_name_prefixes_of_sharded_training(tmp_path):
    _, plain = converted(tmp_path)
    for path in tmp_path.glob("best-*.pt"):
        state = load(path)
        state["model"] = {
            key.replace("experts.", "experts._fsdp_wrapped_module.").replace(
                "layers.1.", "layers.1._fsdp_wrapped_module._fpw_module."
            ): tensor
            for key, tensor in state["model"].items()
        }
        torch.save(state, path)
    convert("meta", "--input", tmp_path / "best.pt", "--output", tmp_path / "again.pt")
    again = load(tmp_path / "again.pt")
    assert again.keys() == plain.keys() and again["cfg"] == plain["cfg"]
    assert again["model"].keys() == plain["model"].keys()
    assert all(torch.equal(tensor, plain["model"][name]) for name, tensor in again["model"].items())


def test_convert_meta_prints_a_note_if_copies_of_an_expert_differ(tmp_path):
    meta_format.write(Meta(WORDS, num_experts=2, ranks=4), tmp_path / "best")
    state = load(tmp_path / "best-rank-3.pt")
    state["model"]["decoder.layers.1.moe_layer.experts.0.fc1.bias"] += 1
    torch.save(state, tmp_path / "best-rank-3.pt")
    printed = convert("meta", "--input", tmp_path / "best", "--output", tmp_path / "ours.pt")
    first, last = tmp_path / "best-rank-1.pt", tmp_path / "best-rank-3.pt"
    assert f"note: {last} and {first} hold the same expert with different weights" in printed


def changed(path, change):
    state = load(path)
    change(state)
    torch.save(state, path)


def model_changed(name, change):
    """Return a function that changes the weights in one file of a folder."""
    return lambda folder: changed(folder / name, lambda state: change(state["model"]))


def option_changed(**options):
    return lambda folder: [
        changed(path, lambda state: state["cfg"]["model"].update(options))
        for path in folder.glob("best-*.pt")
    ]


EXPERT = "decoder.layers.1.moe_layer.experts.0.fc1.bias"
RANK_1 = "FOLDER/best-rank-1.pt, which"
REFUSED = {
    "FOLDER/best-shared.pt, which does not exist": lambda folder: (folder / "best-shared.pt").unlink(),
    "FOLDER/best-rank-0.pt, which does not exist": lambda folder: (folder / "best-rank-0.pt").unlink(),
    "FOLDER/best-rank-0.pt, which lacks the weight decoder.layers.0.moe_layer.experts.2.fc1.weight":
        lambda folder: (folder / "best-rank-1.pt").unlink(),
    "FOLDER/best-rank-3.pt, which does not exist, but 3 files cannot hold 4 experts":
        lambda folder: shutil.copy(folder / "best-rank-1.pt", folder / "best-rank-2.pt"),
    f"{RANK_1} is corrupt or not a checkpoint":
        lambda folder: (folder / "best-rank-1.pt").write_bytes(b"PK half"),
    f"{RANK_1} holds no model": lambda folder: torch.save(torch.ones(2), folder / "best-rank-1.pt"),
    "which holds flattened weights (decoder.flat_param_0) of a sharded training run; save the checkpoint":
        model_changed("best-shared.pt", lambda m: m.update({"decoder.flat_param_0": torch.ones(2)})),
    f"{RANK_1} lacks the weight {EXPERT}": model_changed("best-rank-1.pt", lambda m: m.pop(EXPERT)),
    f"FOLDER/best-rank-1.pt, whose {EXPERT} has the shape (3,) instead of ({H},)":
        model_changed("best-rank-1.pt", lambda m: m.update({EXPERT: torch.ones(3)})),
    "FOLDER/best-rank-0.pt, which has the weight":
        model_changed("best-rank-0.pt", lambda m: m.update({EXPERT.replace("fc1", "fc9"): torch.ones(3)})),
    "FOLDER/best-shared.pt, which has no weight": model_changed(
        "best-shared.pt", lambda m: [m.pop(k) for k in list(m) if "moe_layer" in k]),
    "INPUT holds a model of the architecture lstm_lm, which has no MoE variant":
        option_changed(_name="lstm_lm"),
    "--scale-fc True": option_changed(scale_fc=True),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_convert_meta_rejects_bad_input_with_a_one_sentence_error(sentence, tmp_path):
    meta_format.write(Meta(WORDS), tmp_path / "best")
    REFUSED[sentence](tmp_path)
    with pytest.raises(ValueError) as error:
        read(inputs_of(argparse.Namespace(input=tmp_path / "best.pt")))
    assert sentence.replace("FOLDER", str(tmp_path)) in str(error.value)


def test_convert_meta_does_not_overwrite_its_input_file(tmp_path):
    for path in meta_format.write(Meta(WORDS), tmp_path / "best"):
        message = refusal("meta", "--input", tmp_path / "best", "--output", path)
        assert "which would overwrite the input" in message


def tagged(folder):
    """Return a model whose dictionary has 20 words, two languages and three data-source tags."""
    parser = argparse.ArgumentParser()
    TranslationMultiSimpleEpochTask.add_args(parser)
    words = [str(folder), "--langs", "de,en", "--lang-pairs", "de-en", "--decoder-langtok"]
    task = vars(parser.parse_args(words)) | {"lang_pairs": ["de-en"], "add_data_source_prefix_tags": True}
    task |= {"task": "translation_multi_simple_epoch", "seed": 1}
    return Meta(4 + 20 + 2 + len(TAGS), translates=True, task=task)


def test_convert_meta_writes_dictionaries_with_data_source_tags_that_fit_the_model(tmp_path):
    data, output = tmp_path / "data", tmp_path / "ours"
    for folder in (data, output):
        folder.mkdir()
    for language in ("de", "en"):
        (data / f"dict.{language}.txt").write_text("".join(f"w{i} 1\n" for i in range(20)))
    meta = tagged(data)
    meta_format.write(meta, tmp_path / "best")
    words = ("meta", tmp_path / "best.pt", "--output", output / "model.pt")
    assert "dict.txt" in convert(*words)
    symbols = [line.split()[0] for line in (output / "dict.en.txt").read_text().splitlines()]
    assert symbols == [*(f"w{i}" for i in range(20)), "__de__", "__en__", *TAGS]
    overrides = {"data": str(output), "source_lang": "de", "target_lang": "en"}
    (model,), _, task = load_model_ensemble_and_task([str(output / "model.pt")], arg_overrides=overrides)
    assert len(task.source_dictionary) == meta.words == len(model.encoder.embed_tokens.weight)
    # The new checkpoint does not name the folder of the old dictionaries.
    assert load(output / "model.pt")["cfg"]["task"]["data"] == ""
    assert "is another dictionary" in refusal("meta", tmp_path / "best.pt", "--output", data / "model.pt")
    # First the dictionaries are missing, and then --dictionary names the dictionary of another model.
    (data / "dict.de.txt").unlink()
    (data / "dict.en.txt").rename(data / "others.txt")
    assert "--dictionary" in refusal(*words, "--overwrite")
    (data / "others.txt").write_text("w1 1\n")
    message = refusal(*words, "--overwrite", "--dictionary", data / "others.txt")
    assert f"{meta.words} rows" in message and "10 symbols" in message
