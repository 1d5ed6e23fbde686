"""Stock model options beside experts: each goes on working, or is refused by name.

`FFN_OPTIONS` goes through every option of TransformerConfig that touches the FFN, its input or what
is built around it; a test holds that no option of TransformerConfig is left unsorted.
"""

import dataclasses
import math

import pytest
import torch
from cli import HYDRA, ROOT, fairseq
from models import lm_args, mt_args

WORK = "works"
FFN_OPTIONS = {
    "activation_fn": WORK,  # every value in test_every_activation_trains
    "activation_dropout": ("--activation-dropout", 0.1),
    "relu_dropout": WORK,  # no flag of its own: an alias in old configurations
    "dropout": ("--dropout", 0.2),
    "attention_dropout": ("--attention-dropout", 0.1),
    "encoder.ffn_embed_dim": ("--encoder-ffn-embed-dim", 48),
    "decoder.ffn_embed_dim": ("--decoder-ffn-embed-dim", 24),
    "encoder.normalize_before": ("--encoder-normalize-before",),
    "decoder.normalize_before": ("--decoder-normalize-before",),
    "encoder.layerdrop": ("--encoder-layerdrop", 0.3),
    "decoder.layerdrop": ("--decoder-layerdrop", 0.3),
    "encoder.layers_to_keep": WORK,  # in tests/plugin/test_install_experts.py
    "decoder.layers_to_keep": WORK,
    "share_decoder_input_output_embed": ("--share-decoder-input-output-embed",),
    "share_all_embeddings": WORK,  # in mt_args
    "merge_src_tgt_embed": ("--merge-src-tgt-embed",),
    "layernorm_embedding": ("--layernorm-embedding",),
    "no_token_positional_embeddings": ("--no-token-positional-embeddings",),
    "no_scale_embedding": ("--no-scale-embedding",),
    "checkpoint_activations": ("--checkpoint-activations",),
    "offload_activations": ("--offload-activations",),
    "no_cross_attention": ("--no-cross-attention", "--cross-self-attention"),
    "cross_self_attention": WORK,  # with the one above
    "no_decoder_final_norm": ("--no-decoder-final-norm", "--decoder-normalize-before"),
    "quant_noise.pq": "refused",
    "quant_noise.scalar": "refused",
    "base_layers": "refused",
    "base_sublayers": WORK,  # without --base-layers they mean nothing
    "base_shuffle": WORK,
}
ELSEWHERE = {
    # Embeddings, attention, softmax and output: outside the FFN.
    "adaptive_input", "adaptive_softmax_cutoff", "adaptive_softmax_dropout", "adaptive_softmax_factor",
    "tie_adaptive_weights", "tie_adaptive_proj", "max_source_positions", "max_target_positions",
    "char_inputs", "export", "min_params_to_wrap", "quant_noise.pq_block_size",
    *(f"{side}.{key}" for side in ("encoder", "decoder") for key in (
        "embed_path", "embed_dim", "layers", "attention_heads", "learned_pos", "xformers_att_config",
    )),
    "decoder.input_dim", "decoder.output_dim",
}  # fmt: skip


def test_every_option_of_the_stock_transformer_is_sorted():
    from fairseq.models.transformer import TransformerConfig

    found = set()
    for item in dataclasses.fields(TransformerConfig):
        nested = dataclasses.is_dataclass(item.default) and item.default
        keys = [f.name for f in dataclasses.fields(nested)] if nested else [None]
        found |= {f"{item.name}.{key}" if key else item.name for key in keys}
    found = {key for key in found if not key.endswith("_name")}
    assert found == set(FFN_OPTIONS) | ELSEWHERE


TRAINED = {key: flags for key, flags in FFN_OPTIONS.items() if isinstance(flags, tuple)}


@pytest.mark.parametrize("group", range(4))
def test_the_options_that_touch_the_ffn_train(group, mt_data, tmp_path):
    """One run for several options; those that exclude each other are in different groups."""
    flags = []
    for at, (key, values) in enumerate(TRAINED.items()):
        if at % 4 == group:
            flags += values
            if key == "merge_src_tgt_embed" or key == "share_decoder_input_output_embed":
                flags.append("--share-nothing")
    words = mt_args(mt_data, tmp_path, *[f for f in flags if f != "--share-nothing"], updates=3)
    if "--share-nothing" in flags:
        words.remove("--share-all-embeddings")
    run = fairseq("train", *words)
    first = run.stats("train_inner")[0]
    assert float(first["gnorm"]) > 0
    assert float(first["moe_gate_loss"]) > 0.5


def test_every_activation_trains(lm_data, tmp_path):
    from fairseq.utils import get_available_activation_fns

    from fairseq_tutel.moe.config import ACTIVATIONS

    assert set(ACTIVATIONS) >= set(get_available_activation_fns())
    losses = set()
    for name in ("gelu_accurate", "tanh", "linear"):
        flags = ("--activation-fn", name, "--no-save", "--max-update", 2)
        run = fairseq("train", *lm_args(lm_data, tmp_path, *flags, updates=2))
        losses.add(run.stats("train_inner")[-1]["loss"])
    assert len(losses) == 3


def test_adaptive_input_and_softmax_train_with_the_stock_criterion(lm_data, tmp_path):
    flags = (
        "--arch", "moe_transformer_lm_wiki103", "--criterion", "adaptive_loss",
        "--adaptive-input-cutoff", "10,20", "--adaptive-softmax-cutoff", "10,20",
        "--ddp-backend", "legacy_ddp",
    )  # fmt: skip
    run = fairseq("train", *lm_args(lm_data, tmp_path, *flags))
    records = run.stats("train_inner")
    assert float(records[-1]["loss"]) < float(records[0]["loss"])
    assert "without a balance loss" in run.output


def test_scale_fc_becomes_a_layer_norm_inside_the_experts(lm_data, tmp_path):
    flags = ("--scale-fc", "--scale-attn", "--scale-heads", "--scale-resids")
    fairseq("train", *lm_args(lm_data, tmp_path, *flags), ranks=2)
    model = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"]
    name = "decoder.layers.1.fc1.experts.hidden_layer_norm.weight"
    assert model[name].shape == (32,)
    assert (model[name] - 1).abs().max() > 0
    assert not any("ffn_layernorm" in key for key in model)


def test_checkpointed_activations_change_no_number(lm_data, tmp_path):
    flags = (
        "--optimizer", "moe_sgd", "--moe-gate-loss-wt", 1.0, "--activation-dropout", 0.1, "--moe-eom", 0.2,
        "--moe-fom", 0.1, "--moe-cmr", "--cmr-gate-drop", 0.2, "--cmr-gate-loss-wt", 1.0,
    )  # fmt: skip
    models = []
    for extra in ((), ("--checkpoint-activations",)):
        folder = tmp_path / str(len(models))
        fairseq("train", *lm_args(lm_data, folder, *flags, *extra))
        saved = torch.load(folder / "checkpoint_last.pt", weights_only=False)
        models.append(saved["model"])
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_the_balance_loss_balances(lm_data, tmp_path):
    """The weight of the balance loss reaches the gate: a large one evens the load."""
    found = {}
    for weight in (0.0, 5.0):
        flags = ("--moe-gate-loss-wt", weight, "--moe-top-k", 1, "--lr", 0.03, "--no-save")
        run = fairseq("train", *lm_args(lm_data, tmp_path, *flags, updates=30))
        last = run.stats("train_inner")[-8:]
        found[weight] = sum(float(r["moe_gate_loss"]) for r in last) / len(last)
    assert found[5.0] < found[0.0] - 0.05


def test_the_balance_loss_is_combined_and_transformed(lm_data, tmp_path):
    flags = ("--moe-gate-loss-combine-method", "sum", "--moe-gate-loss-transform", "neg_log")
    run = fairseq("train", *lm_args(lm_data, tmp_path, *flags, "--no-save", updates=1))
    record = run.stats("train_inner")[0]
    expected = -math.log(2 * float(record["moe_gshard_loss"]))
    assert float(record["moe_gate_loss"]) == pytest.approx(expected, abs=2e-4)


def test_every_model_option_reaches_a_layer_through_hydra_too(lm_data, tmp_path):
    overrides = [
        "model.moe_expert_ffn_dim=12", "model.moe_expert_count='4,6,8'", "+model.moe_top1_expert=true",
        "+model.moe_expert_type=glu", "+model.no_moe_gating_use_fp32=true", "+model.moe_gate_type=linear",
        "+model.moe_eval_capacity_factor=0.5", "+model.moe_balance_loss=none", "model.decoder_layers=6",
        "model.decoder_input_dim=16", "model.decoder_output_dim=16",
        "+model.moe_drop_policy=position", "model.moe_capacity_factor=1.5", "model.moe_freq=2",
        "+model.moe_pregate=2", "+model.moe_eom=0.1", "+model.moe_fom=0.1", "+model.moe_cmr=true",
        "+model.cmr_gate_drop=0.1", "+model.moe_local_drop=0.5", "+criterion.cmr_gate_loss_wt=0.1",
        "+criterion.cmr_gate_loss_p=0.7",
        "+task.moe_exchange=padded", "+task.moe_backend=reference", "+task.record_a2a_perf_stats=true",
        "+task.moe_expert_parallel_size=2", "+criterion.moe_gate_loss_combine_method=sum",
        "+criterion.moe_gate_loss_transform=none", "model.decoder_embed_dim=16",
        "model.decoder_ffn_embed_dim=32", "model.decoder_attention_heads=2", "dataset.num_workers=0",
        "dataset.required_batch_size_multiple=1", "optimization.max_update=1", "common.log_interval=1",
    ]  # fmt: skip
    run = fairseq(
        "tutel-train", "--config-dir", HYDRA, "--config-name", "tiny_lm", f"task.data={lm_data}",
        f"checkpoint.save_dir={tmp_path}", *overrides, env={"PWD": str(ROOT)}, ranks=2,
    )  # fmt: skip
    assert "4/6/8 experts, top-1, hidden 12, capacity factor 1.5 (evaluation 0.5)" in run.output
    assert "expert parallel size 2" in run.output
    assert "--moe-pregate 2: the gates of 1 of 3 MoE layers of the decoder" in run.output
    model = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"]
    assert model["decoder.layers.5.fc1.experts.fc3_weight"].shape == (8, 12, 16)
    assert model["decoder.layers.5.fc1.beside.cmr_gate.bias"].shape == (1,)


def test_several_kinds_of_optimizer_train_on_two_ranks(lm_data, tmp_path):
    for name, flags in {"moe_adadelta": (), "moe_nag": ("--momentum", 0.9)}.items():
        words = lm_args(lm_data, tmp_path / name, "--optimizer", name, *flags, updates=3)
        run = fairseq("train", *words, ranks=2)
        assert len(run.stats("train_inner")) == 3, name


def test_encoder_and_decoder_frequencies_choose_their_layers(mt_data, tmp_path):
    flags = ("--encoder-moe-freq", 0, "--decoder-moe-freq", 2)
    fairseq("train", *mt_args(mt_data, tmp_path, *flags, updates=2))
    model = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"]
    layers = {key.split(".fc1")[0] for key in model if ".fc1.experts." in key}
    assert layers == {"decoder.layers.1"}
