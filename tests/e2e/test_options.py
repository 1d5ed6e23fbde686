"""MoE models train with options of fairseq's models, and with MoE options from a hydra configuration."""

import torch
from cli import HYDRA, ROOT, fairseq
from models import lm_args


def test_a_model_with_adaptive_input_and_softmax_trains_with_fairseq_s_criterion(lm_data, tmp_path):
    flags = (
        "--arch", "moe_transformer_lm_wiki103", "--criterion", "adaptive_loss",
        "--adaptive-input-cutoff", "10,20", "--adaptive-softmax-cutoff", "10,20",
        "--ddp-backend", "legacy_ddp",
    )  # fmt: skip
    run = fairseq("train", *lm_args(lm_data, tmp_path, *flags, updates=4))
    records = run.stats("train_inner")
    assert float(records[-1]["loss"]) < float(records[0]["loss"])
    assert "without a balance loss" in run.output


def test_the_option_scale_fc_adds_a_layer_norm_inside_the_experts(lm_data, tmp_path):
    flags = ("--scale-fc", "--scale-attn", "--scale-heads", "--scale-resids")
    fairseq("train", *lm_args(lm_data, tmp_path, *flags, updates=2))
    model = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"]
    name = "decoder.layers.1.fc1.experts.hidden_layer_norm.weight"
    assert model[name].shape == (32,)
    assert (model[name] - 1).abs().max() > 0
    assert not any("ffn_layernorm" in key for key in model)


def test_every_model_option_reaches_a_moe_layer_through_hydra(lm_data, tmp_path):
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
    model = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"]
    assert model["decoder.layers.5.fc1.experts.fc3_weight"].shape == (8, 12, 16)
    assert model["decoder.layers.5.fc1.beside.cmr_gate.bias"].shape == (1,)
