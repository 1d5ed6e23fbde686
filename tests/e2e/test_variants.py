"""MoE variants of all families train through the stock commands, and what they learnt is used."""

import json
import shutil
from functools import cache

import pytest
import torch
from cli import fairseq, refused
from equality import learns, same_training
from models import COMMON, EXPERTS, SOUND_DIR, lm_args, mt_args
from sounds import banks, tones
from tool_in_process import refusal_of

# 20 ms a frame.
CONVOLUTIONS = "[(16, 10, 5)] + [(16, 8, 8)] * 2"
WAVES = (
    "--conv-feature-layers", CONVOLUTIONS, "--encoder-layers", 2, "--encoder-embed-dim", 16,
    "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 2, "--conv-pos", 8,
    "--conv-pos-groups", 2, "--mask-length", 2, "--mask-prob", 0.4, "--dropout", 0,
    "--attention-dropout", 0, "--final-dim", 16, *EXPERTS,
)  # fmt: skip
PRETRAINED = {
    "wav2vec2": (
        "--task", "moe_audio_pretraining", "--arch", "moe_wav2vec2", "--criterion", "moe_wav2vec",
        "--enable-padding", "--num-negatives", 4, "--quantize-targets", "--latent-vars", 8, "--infonce",
    ),
    "hubert": (
        "--task", "moe_hubert_pretraining", "--arch", "moe_hubert", "--criterion", "moe_hubert",
        "--labels", '["km"]', "--label-rate", 50, "--pad-audio", "--random-crop",
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def sound_data(tmp_path_factory):
    """Sounds with their text."""
    return tones(tmp_path_factory.mktemp("sounds") / "of")


def _pretrain(kind, data, folder, *extra, updates=2, **kwargs):
    words = (*PRETRAINED[kind], *WAVES, "--max-update", updates, "--save-dir", folder, *extra)
    return fairseq("train", data, *COMMON, *words, **kwargs)


def one_quick(kinds):
    """Return kinds for a test; all but the first take it to make test-long."""
    first, *others = kinds
    return first, *(pytest.param(kind, marks=pytest.mark.long) for kind in others)


def _load(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


@pytest.mark.long
@pytest.mark.parametrize("kind", PRETRAINED)
def test_waves(kind, sound_data, tmp_path):
    learns(_pretrain(kind, sound_data, tmp_path, updates=60))
    extra = ("--checkpoint-activations", "--max-update", 62)
    resumed = _pretrain(kind, sound_data, tmp_path, *extra, ranks=2)
    assert "expert parallel size 2" in resumed.output
    assert len(resumed.stats("train_inner")) == 2


DECODER = (
    "--decoder-layers", 1, "--decoder-ffn-embed-dim", 32, "--decoder-attention-heads", 2,
    "--criterion", "moe_cross_entropy",
)  # fmt: skip
WRITES = ("--task", "moe_audio_finetuning", "--labels", "ltr", "--autoregressive")
CTC = ("--criterion", "moe_ctc", "--post-process", "letter")
# The pretrained model, the task, and how it goes on; stock's decoders expect so many numbers a frame.
FINE_TUNED = {
    "wav2vec_ctc": ("wav2vec2", WRITES[:-1], CTC),
    "wav2vec_seq2seq": ("wav2vec2", WRITES, (*DECODER, "--decoder-embed-dim", 512)),
    "hubert_ctc": (
        "hubert",
        (
            "--task", "moe_hubert_pretraining", "--labels", '["ltr"]', "--fine-tuning",
            "--single-target", "--label-rate", -1, "--pad-audio", "--random-crop",
        ),
        CTC,
    ),
    "hubert_seq2seq": ("hubert", WRITES, (*DECODER, "--decoder-embed-dim", 768)),
}  # fmt: skip


def _fine_tune(kind, data, pretrained, folder, *extra, command=fairseq, updates=6, **kwargs):
    words = (
        *FINE_TUNED[kind][1], *FINE_TUNED[kind][2], "--arch", f"moe_{kind}", "--w2v-path", pretrained,
        "--feature-grad-mult", 1, "--max-update", updates, "--save-dir", folder, *extra,
    )  # fmt: skip
    return command("train", data, *COMMON, *words, **kwargs)


@pytest.fixture(scope="module")
def pretrained(sound_data, tmp_path_factory):
    """What returns the path of a small pretrained model."""

    @cache
    def path_of(kind):
        folder = tmp_path_factory.mktemp(kind)
        _pretrain(kind, sound_data, folder, "--moe-top-k", 1)
        return folder / "checkpoint_last.pt"

    return path_of


@pytest.mark.long
@pytest.mark.parametrize("kind", FINE_TUNED)
def test_what_goes_on_with_a_pretrained_model(kind, sound_data, pretrained, tmp_path):
    path = pretrained(FINE_TUNED[kind][0])
    _fine_tune(kind, sound_data, path, tmp_path / "still", "--lr", 0.0, updates=1)
    before = torch.load(path, weights_only=False)["model"]
    after = {name.partition("w2v_model.")[2]: v for name, v in _load(tmp_path / "still")["model"].items()}
    experts = [name for name in before if ".fc1." in name]
    assert len(experts) > 8
    assert all(torch.equal(before[name], after[name]) for name in experts)
    sgd = ("--optimizer", "moe_sgd", "--lr", 0.1)
    for ranks in (1, 2):
        run = _fine_tune(
            kind, sound_data, path, tmp_path / str(ranks), *sgd, "--update-freq", 2 // ranks, ranks=ranks
        )
        learns(run)
    assert "expert parallel size 2" in run.output
    same_training(tmp_path / "1", tmp_path / "2")
    trained, folder, back = tmp_path / "2" / "checkpoint_last.pt", tmp_path / "f", tmp_path / "b.pt"
    said = json.loads(fairseq("tutel-__main__", "inspect", trained, "--json").output)
    logged = [f"moe_load_{layer['layer']}" for layer in said["layers"]]
    assert len(logged) == 2 and set(logged) <= run.stats("train_inner")[0].keys()
    # hubert's checkpoints do not repeat the options of the pretrained one.
    expected = {"--moe-freq": 1, "--moe-expert-count": "4", "--moe-top-k": 1}
    assert said.get("options", expected) == expected
    for words in (("safetensors", trained, folder), ("from-safetensors", folder, back)):
        fairseq("tutel-__main__", "convert", words[0], "--input", words[1], "--output", words[2])
    output = fairseq(
        "validate", sound_data, "--user-dir", SOUND_DIR, *FINE_TUNED[kind][1], "--path", back,
        "--batch-size", 4, "--log-format", "json", "--required-batch-size-multiple", 1,
    )  # fmt: skip
    (found,), (*_, expected) = output.stats("valid"), run.stats("valid")
    assert float(found["valid_loss"]) == pytest.approx(float(expected["valid_loss"]), rel=0.02)


def test_what_goes_on_needs_experts_where_they_are(sound_data, pretrained, tmp_path):
    path = pretrained("wav2vec2")
    kind, extra = "wav2vec_ctc", ("--arch", "wav2vec_ctc", "--criterion", "ctc")
    output = _fine_tune(kind, sound_data, path, tmp_path, *extra, command=refused)
    assert "--arch wav2vec_ctc is dense, but --w2v-path" in output


BANKS = (
    "--max-tokens", 4000, "--encoder-layers", 2, "--decoder-layers", 2, "--encoder-embed-dim", 16,
    "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 2, "--decoder-embed-dim", 16,
    "--decoder-ffn-embed-dim", 32, "--decoder-attention-heads", 2, "--dropout", 0, *EXPERTS,
)  # fmt: skip
OF_BANKS = {
    "s2t_transformer": ("--conv-channels", 16),
    "s2t_conformer": ("--conv-channels", 16, "--depthwise-conv-kernel-size", 3),
    "convtransformer": ("--input-feat-per-channel", 16),
}


@pytest.mark.parametrize("kind", one_quick(OF_BANKS))
def test_filter_banks(kind, sound_data, tmp_path):
    data = banks(sound_data, tmp_path / "banks")
    words = (
        "--task", "moe_speech_to_text", "--arch", f"moe_{kind}", "--criterion",
        "moe_label_smoothed_cross_entropy", *BANKS, *OF_BANKS[kind], "--max-update", 6,
        "--optimizer", "moe_sgd", "--lr", 0.1,
    )  # fmt: skip
    for ranks in (1, 2):
        folder = ("--save-dir", tmp_path / str(ranks), "--update-freq", 2 // ranks)
        run = fairseq("train", data, *COMMON, *words, *folder, ranks=ranks)
        learns(run)
    if "conformer" not in kind:  # which has batch norms
        same_training(tmp_path / "1", tmp_path / "2")
    output = fairseq(
        "generate", data, "--user-dir", SOUND_DIR, "--task", "moe_speech_to_text", "--gen-subset",
        "valid", "--path", tmp_path / "2" / "checkpoint_last.pt", "--max-tokens", 4000,
        "--required-batch-size-multiple", 1,
    )  # fmt: skip
    assert output.output.count("\nH-") == 6
    words = ("tokens", tmp_path / "2", data, "--output", tmp_path / "page.html")
    for more in ((), ("--text", "a b")):
        assert refusal_of(*words, *more).endswith(
            "which reads neither text nor images; give another model."
        )


LEVENSHTEIN = ("--task", "moe_translation_lev", "--criterion", "moe_nat_loss")
NOT_AUTOREGRESSIVE = {
    "nonautoregressive_transformer": ("--noise", "full_mask"),
    "iterative_nonautoregressive_transformer": ("--noise", "full_mask", "--train-step", 2),
    "cmlm_transformer": ("--noise", "random_mask"),
    "levenshtein_transformer": ("--noise", "random_delete"),
    "insertion_transformer": ("--noise", "random_delete"),
}


@pytest.mark.parametrize("kind", one_quick(NOT_AUTOREGRESSIVE))
def test_not_autoregressive(kind, mt_data, tmp_path):
    words = (*LEVENSHTEIN, "--arch", f"moe_{kind}", *NOT_AUTOREGRESSIVE[kind])
    words = (*words, "--optimizer", "moe_sgd", "--lr", 0.1)
    for ranks in (1, 2):
        args = mt_args(mt_data, tmp_path / str(ranks), *words, "--update-freq", 2 // ranks)
        run = fairseq("train", *args, ranks=ranks)
        learns(run)
    if "full_mask" in words and kind.startswith("non"):  # others draw noise for each micro-batch
        same_training(tmp_path / "1", tmp_path / "2")
    output = fairseq(
        "generate", mt_data, "--user-dir", SOUND_DIR, "--task", "moe_translation_lev", "--path",
        tmp_path / "2" / "checkpoint_last.pt", "--iter-decode-max-iter", 2, "--iter-decode-eos-penalty", 0,
        "--beam", 1, "--batch-size", 8, "--required-batch-size-multiple", 1,
    )  # fmt: skip
    assert output.output.count("\nH-") == 21


MULTILINGUAL = (
    "--task", "multilingual_translation", "--arch", "moe_multilingual_transformer", "--lang-pairs",
    "de-en,en-de", "--optimizer", "moe_sgd", "--lr", 0.1,
)  # fmt: skip
SHARED = {
    "separate": (), "both": ("--share-encoders", "--share-decoders"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", SHARED)
def test_multilingual_pairs(kind, mt_data, tmp_path):
    for ranks in (1, 2):
        words = (*MULTILINGUAL, *SHARED[kind], "--update-freq", 2 // ranks)
        run = fairseq("train", *mt_args(mt_data, tmp_path / str(ranks), *words), ranks=ranks)
        learns(run)
    same_training(tmp_path / "1", tmp_path / "2")
    first = run.stats("train_inner")[0]
    loads = {key.removeprefix("moe_load_") for key in first if key.startswith("moe_load_")}
    assert {"de-en_encoder_0", "de-en_decoder_1"} <= loads
    assert ("en-de_encoder_0" in loads) == (kind == "separate")
    output = fairseq(
        "generate", mt_data, "--user-dir", SOUND_DIR, *MULTILINGUAL[:2], "--lang-pairs", "de-en,en-de",
        "-s", "en", "-t", "de", "--path", tmp_path / "2" / "checkpoint_last.pt",
        "--required-batch-size-multiple", 1,
    )  # fmt: skip
    assert output.output.count("\nH-") == 21


CONVOLVED = (
    "--arch", "moe_lightconv_iwslt_de_en", "--encoder-conv-type", "lightweight", "--decoder-conv-type",
    "lightweight", "--encoder-kernel-size-list", "[3,3]", "--decoder-kernel-size-list", "[3,3]",
    "--encoder-conv-dim", 16, "--decoder-conv-dim", 16, "--optimizer", "moe_sgd", "--lr", 0.1,
    "--attention-dropout", 0, "--weight-dropout", 0, "--input-dropout", 0, "--relu-dropout", 0,
)  # fmt: skip


@pytest.mark.long
def test_lightweight_convolutions(mt_data, tmp_path):
    for ranks in (1, 2):
        words = (*CONVOLVED, "--update-freq", 2 // ranks)
        learns(fairseq("train", *mt_args(mt_data, tmp_path / str(ranks), *words), ranks=ranks))
    same_training(tmp_path / "1", tmp_path / "2")
    output = fairseq(
        "generate", mt_data, "--user-dir", SOUND_DIR, "--path", tmp_path / "2" / "checkpoint_last.pt",
        "--required-batch-size-multiple", 1,
    )  # fmt: skip
    assert output.output.count("\nH-") == 21


@pytest.mark.long
def test_lightweight_language_model(lm_data, tmp_path):
    words = (
        "--arch", "moe_lightconv_lm", "--decoder-kernel-size-list", "[3,3]", "--decoder-conv-type",
        "lightweight",
    )  # fmt: skip
    learns(fairseq("train", *lm_args(lm_data, tmp_path, *words), ranks=2))
    fairseq(
        "eval-lm", lm_data, "--user-dir", SOUND_DIR, "--path", tmp_path / "checkpoint_last.pt",
        "--batch-size", 4,
    )  # fmt: skip


@pytest.mark.long
def test_alignments(mt_data, tmp_path):
    """The target of this corpus is its source, reversed."""
    for split in ("train", "valid", "test"):
        for lang in ("de", "en"):
            shutil.copy(mt_data.parent / f"{split}.{lang}", tmp_path)
        lengths = [len(line.split()) for line in (tmp_path / f"{split}.de").open()]
        pairs = [" ".join(f"{i}-{n - 1 - i}" for i in range(n)) for n in lengths]
        (tmp_path / f"{split}.align").write_text("\n".join(pairs) + "\n")
    prefixes = [f"--{s}pref={tmp_path / s}" for s in ("train", "valid", "test")]
    fairseq(
        "preprocess", "-s", "de", "-t", "en", *prefixes, "--destdir", tmp_path / "bin", "--align-suffix",
        "align", "--joined-dictionary", "--srcdict", mt_data / "dict.de.txt",
    )  # fmt: skip
    words = (
        "--arch", "moe_transformer_align", "--load-alignments", "--full-context-alignment", "--criterion",
        "moe_label_smoothed_cross_entropy_with_alignment", "--alignment-layer", 1,
    )  # fmt: skip
    run = fairseq("train", *mt_args(tmp_path / "bin", tmp_path, *words, updates=12), ranks=2)
    learns(run)
    assert all(float(log["alignment_loss"]) > 0 for log in run.stats("train_inner"))
    output = fairseq(
        "generate", tmp_path / "bin", "--user-dir", SOUND_DIR, "--path", tmp_path / "checkpoint_last.pt",
        "--print-alignment", "hard", "--required-batch-size-multiple", 1,
    )  # fmt: skip
    assert output.output.count("\nA-") == 21


@pytest.mark.long
def test_channels_of_speech(mt_data, tmp_path):
    for name in ("one", "two"):
        for split in ("train", "valid"):
            for ending in ("bin", "idx"):
                source = mt_data / f"{split}.de-en.de.{ending}"
                shutil.copy(source, tmp_path / f"{split}.{name}.{ending}")
        shutil.copy(mt_data / "dict.de.txt", tmp_path / f"dict.{name}.txt")
    words = (
        "--task", "moe_speech_dlm_task", "--arch", "moe_speech_dlm", "--criterion",
        "moe_speech_dlm_criterion", "--tokens-per-sample", 16, "--decoder-cross-layers", 1,
        "--main-and-cross-weights", "0.5,0.5", "--channels", "one,two",
    )  # fmt: skip
    learns(fairseq("train", *lm_args(tmp_path, tmp_path, *words), ranks=2))


@pytest.mark.long
def test_classes_of_sentences(lm_data, tmp_path):
    """Whether the first word's number is below 20."""
    for split in ("train", "valid"):
        lines = (lm_data.parent / f"{split}.txt").read_text().splitlines()
        labels = ["low" if int(line.split()[0][1:]) < 20 else "high" for line in lines]
        (tmp_path / f"{split}.label").write_text("\n".join(labels) + "\n")
        shutil.copy(lm_data.parent / f"{split}.txt", tmp_path / f"{split}.input0")
    for part, extra in (("input0", ("--srcdict", lm_data / "dict.txt")), ("label", ())):
        prefixes = [f"--{split}pref={tmp_path / split}.{part}" for split in ("train", "valid")]
        fairseq("preprocess", "--only-source", *prefixes, "--destdir", tmp_path / "bin" / part, *extra)
    sizes = (
        "--encoder-layers", 2, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 32,
        "--encoder-attention-heads", 2, *EXPERTS, "--max-update", 6,
    )  # fmt: skip
    words = ("--task", "moe_masked_lm", "--criterion", "moe_masked_lm", "--tokens-per-sample", 32)
    words = (*words, "--arch", "moe_roberta_base", *sizes, "--save-dir", tmp_path / "pretrained")
    fairseq("train", lm_data, *COMMON, *words)
    words = (
        "--task", "moe_sentence_prediction", "--criterion", "moe_sentence_prediction", "--num-classes", 2,
        "--init-token", 0, "--arch", "moe_roberta_base", *sizes, "--save-dir", tmp_path / "tuned",
        "--restore-file", tmp_path / "pretrained" / "checkpoint_last.pt", "--reset-optimizer",
        "--reset-dataloader", "--reset-meters", "--max-update", 60, "--lr", 0.003, "--max-positions", 32,
        "--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric",
    )  # fmt: skip
    run = fairseq("train", tmp_path / "bin", *COMMON, *words, ranks=2)
    learns(run)
    assert float(run.stats("valid")[-1]["valid_accuracy"]) > 60
    output = fairseq(
        "validate", tmp_path / "bin", "--user-dir", SOUND_DIR, *words[:4], "--num-classes", 2,
        "--init-token", 0, "--path", tmp_path / "tuned" / "checkpoint_last.pt", "--batch-size", 4,
        "--log-format", "json", "--required-batch-size-multiple", 1,
    )  # fmt: skip
    found, expected = output.stats("valid")[-1], run.stats("valid")[-1]
    assert found["valid_accuracy"] == expected["valid_accuracy"]
