"""The output of `inspect` for files of every kind, as text and as JSON."""

import json

import pytest
import torch
from moe_files import D, E, H, save
from tool_in_process import convert, tool


def inspect(*words):
    """Run the tool; return its output, parsed if --json is given."""
    text = tool("inspect", *words)
    return json.loads(text) if "--json" in words else text


EXPERT = {"fc1_weight": [H, D], "fc1_bias": [H], "fc2_weight": [D, H], "fc2_bias": [D]}
BYTES = 4 * E * sum(torch.Size(shape).numel() for shape in EXPERT.values())


def test_inspect_lists_the_content_of_a_checkpoint(tmp_path):
    path = save(tmp_path / "a.pt", top_k=1, gate_type="cosine", balance_bias=True)
    facts = inspect(path, "--json")
    assert facts["kind"] == "fairseq_tutel, with experts"
    assert facts["names"]["model"] == "moe_transformer_lm"
    assert (facts["updates"], facts["epoch"]) == (9, 3)
    assert facts["bytes_of_file"] == path.stat().st_size
    beside = 4 * (1 + 5 * D + 2 * (D + 256 * D + 256 + E * 256 + 1 + E))
    assert facts["bytes"] == {"experts": 2 * BYTES, "other weights": beside, "optimizer state": 0}
    assert facts["options"] == {
        "--moe-top-k": 1,
        "--moe-gate-type": "cosine",
        "--moe-balance-bias": True,
        "--moe-expert-ffn-dim": H,
        "--moe-expert-count": str(E),
        "--moe-freq": 1,
    }
    assert [layer["layer"] for layer in facts["layers"]] == ["decoder_0", "decoder_1"]
    layer = facts["layers"][0]
    assert (layer["experts"], layer["shapes"], layer["bytes"]) == (E, EXPERT, BYTES)
    assert layer["beside"]["gate.directions"] == [E, 256]
    assert layer["beside"]["balance_bias.bias"] == [E]
    of_experts = {t["name"]: t["number"] for t in facts["tensors"] if ".experts." in t["name"]}
    assert of_experts == {f"decoder.layers.N.fc1.experts.{name}": 2 for name in EXPERT}
    text = inspect(path)
    assert "9 updates, in epoch 3\n" in text
    assert "--moe-top-k 1, " in text or "--moe-top-k 1\n" in text
    assert "decoder_1  4        fc1_weight 6x8 fc1_bias 6 fc2_weight 8x6 fc2_bias 8  float32" in text
    assert "decoder.layers.N" not in text


def test_tied_weights_count_once(tmp_path):
    def tie(model):
        model["decoder.output_projection.weight"] = model["decoder.embed_tokens.weight"]

    plain, tied = save(tmp_path / "a.pt"), save(tmp_path / "b.pt", change=tie)
    sizes = [inspect(path, "--json")["bytes"]["other weights"] for path in (plain, tied)]
    assert sizes[0] == sizes[1]
    state = torch.load(plain, weights_only=True)
    state["last_optimizer_state"] = {"state": {0: {"step": 3, "exp_avg": torch.ones(10, 3)}}}
    torch.save(state, plain)
    assert inspect(plain, "--json")["bytes"]["optimizer state"] == 120


def test_inspect_has_the_same_output_for_shards_and_for_one_file(tmp_path):
    path = save(tmp_path / "a.pt")
    whole = inspect(path, "--json")
    convert("sharded", "--input", path, "--output", tmp_path / "b.pt")
    text = inspect(tmp_path / "b.pt")
    sharded = inspect(tmp_path / "b.pt", "--json")
    for facts in (whole, sharded):
        del facts["file"], facts["bytes_of_file"]
    (folder,) = (tmp_path / "experts").iterdir()
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert sharded.pop("shards") == {"folders": [str(folder)], "files": 2, "bytes": size}
    assert sharded == whole
    assert "sharded: experts in 2 files, " in text and f" of {folder}\n" in text


def flip_last(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damaged_shards_are_detected(tmp_path):
    convert("sharded", "--input", save(tmp_path / "a.pt"), "--output", tmp_path / "b.pt")
    assert "checked: all bytes match their checksums\n" in inspect(tmp_path / "b.pt", "--check")
    file = max((tmp_path / "experts").rglob("*.safetensors"))
    whole = file.read_bytes()
    flip_last(file)
    inspect(tmp_path / "b.pt")
    with pytest.raises(SystemExit, match="differs from the saved tensor") as end:
        inspect(tmp_path / "b.pt", "--check")
    assert str(file) in end.value.code
    for cut in (whole[:-1], whole[:20], b""):
        file.write_bytes(cut)
        with pytest.raises(SystemExit, match=r"which is corrupt or missing \(.*give an older") as end:
            inspect(tmp_path / "b.pt")
        assert str(file) in end.value.code


def test_check_detects_a_changed_byte_of_the_checkpoint_file(tmp_path):
    path = save(tmp_path / "a.pt", change=lambda model: model.update(mark=torch.full((64,), 7.5)))
    mark = torch.full((64,), 7.5).numpy().tobytes()
    path.write_bytes(path.read_bytes().replace(mark, b"\1" + mark[1:]))
    inspect(path)
    with pytest.raises(SystemExit, match=r"a\.pt, whose bytes do not match their checksums"):
        inspect(path, "--check")
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    assert "not checked: a file from before" in inspect(path, "--check")


def test_inspect_lists_only_options_that_differ_from_the_default(tmp_path):
    path = save(tmp_path / "a.pt", top_k=1)
    state = torch.load(path, weights_only=True)
    state["cfg"]["model"] |= {
        "encoder_moe_freq": -1, "moe_gate_loss_wt": 0.01, "moe_gate_loss_combine_method": "average",
        "moe_exchange": "ragged", "moe_comm_timeout": 1800, "moe_normalize_gate": "before",
    }  # fmt: skip
    torch.save(state, path)
    own = {"--moe-top-k": 1, "--moe-expert-ffn-dim": H, "--moe-expert-count": str(E), "--moe-freq": 1}
    assert inspect(path, "--json")["options"] == own


KINDS = {
    "fairseq, dense": {"model": {"decoder.layers.0.fc1.weight": torch.ones(3, 2)}},
    "Meta's moe branch, one rank's experts": {
        "model": {"decoder.layers.1.moe_layer.experts.0.fc1.weight": torch.ones(3, 2)}
    },
    "Meta's moe branch, weights that all ranks share": {
        "model": {"decoder.layers.1.moe_layer.gate.wg.weight": torch.ones(3, 2)}
    },
    "Tutel, one rank's part": {
        "moe.experts.batched_fc1_w": torch.ones(1, 3, 2), "moe._num_global_experts": torch.tensor(2),
    },
    "fairseq_tutel, the state dict of a layer or model": {"experts.fc1_weight": torch.ones(2, 3, 2)},
    "tensors": {"a": [torch.ones(3, 2)], "b": "text"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_names_the_system_that_wrote_a_file(kind, tmp_path):
    torch.save(KINDS[kind], tmp_path / "a.pt")
    facts = inspect(tmp_path / "a.pt", "--json")
    assert facts["kind"] == kind
    assert [3, 2] in [t["shape"][-2:] for t in facts["tensors"]]
    text = inspect(tmp_path / "a.pt")
    assert kind in text and "3x2" in text


@pytest.mark.parametrize("value", [{"a": "b"}, 3])
def test_files_without_tensors_are_refused(value, tmp_path):
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(SystemExit, match="which holds no tensors"):
        inspect(tmp_path / "a.pt")
    with pytest.raises(SystemExit, match=r"b\.pt, which does not exist"):
        inspect(tmp_path / "b.pt")
    with pytest.raises(SystemExit, match=r"a folder without checkpoint_best.pt"):
        inspect(tmp_path)
