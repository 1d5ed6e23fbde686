"""moe_roberta and moe_bart train on two ranks, and open in Python."""

import pytest
from cli import USER_DIR, fairseq

import fairseq_tutel

SMALL_ENCODER = (
    "--encoder-layers", 2, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 32,
    "--encoder-attention-heads", 2, "--dropout", 0.1, "--attention-dropout", 0.1,
)  # fmt: skip
SMALL_DECODER = (
    "--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 32,
    "--decoder-attention-heads", 2,
)  # fmt: skip
KINDS = {
    "roberta": (
        "--task", "moe_masked_lm", "--arch", "moe_roberta_base", "--criterion", "moe_masked_lm",
        *SMALL_ENCODER, "--moe-freq", 2, "--moe-expert-count", 4,
    ),
    "bart": (
        "--task", "moe_denoising", "--arch", "moe_bart_base", "--criterion",
        "moe_label_smoothed_cross_entropy", "--label-smoothing", 0.1, *SMALL_ENCODER,
        *SMALL_DECODER, "--moe-freq", 2, "--moe-expert-count", 4, "--mask", 0.3, "--mask-random", 0.1,
        "--poisson-lambda", 3.0, "--permute-sentences", 1, "--replace-length", 1,
    ),
}  # fmt: skip


def _train(kind, data, folder):
    return fairseq(
        "train", data, "--user-dir", USER_DIR, *KINDS[kind], "--tokens-per-sample", 32,
        "--batch-size", 4, "--optimizer", "moe_adam", "--lr", 0.01, "--clip-norm", 1,
        "--max-update", 5, "--save-dir", folder, "--no-epoch-checkpoints", "--num-workers", 0,
        "--log-format", "json", "--log-interval", 1, "--required-batch-size-multiple", 1,
        ranks=2,
    )  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def trained(request, lm_data, tmp_path_factory):
    """The kind, the --save-dir and the finished training command of a model that two ranks trained."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, _train(request.param, lm_data, folder)


def test_roberta_and_bart_train_and_log_metrics_of_experts(trained):
    kind, _, run = trained
    first, *_, last = run.stats("train_inner")
    assert float(last["nll_loss"]) < float(first["nll_loss"])
    assert float(first["moe_gate_loss"]) > 0.5
    layers = {"roberta": ["encoder_1"], "bart": ["encoder_1", "decoder_1"]}[kind]
    assert [key.removeprefix("moe_load_") for key in first if "moe_load" in key] == layers
    assert sum(first[f"moe_load_{layers[0]}"]) == pytest.approx(4, abs=0.01)


def test_roberta_and_bart_open_in_fairseq_s_hub_interfaces(trained, lm_data):
    kind, folder, _ = trained
    model = fairseq_tutel.from_checkpoint(folder)
    if kind == "bart":
        assert len(model.fill_mask(["w1 <mask> w9"], topk=3)[0]) == 3
        return
    assert model.extract_features(model.encode("w1 w9")).shape == (1, 4, 16)
    experts = model.model.encoder.sentence_encoder.layers[1].fc1.experts
    assert experts.fc1_weight.shape == (4, 32, 16)
