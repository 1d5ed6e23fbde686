"""Memory and time of importing a released NLLB-MoE.

The script writes a random NLLB-MoE with --gib GiB of experts in fp32. The import runs in its own process,
whose anonymous memory (RssAnon) is sampled from outside.

    python -m benchmarks.released --gib 3 --expert-dtype int8
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from fairseq_tutel.checkpoint.shards import write_pieces
from fairseq_tutel.convert.released.families.nllb_moe import NLLB_MOE

MIB, GIB = 2**20, 2**30
SIZES = {
    "d_model": 1024, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 16,
    "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "vocab_size": 8000,
    "encoder_sparse_step": 2, "decoder_sparse_step": 2,
}  # fmt: skip
EXPERT_BYTES = 4 * (2 * 1024 * 4096 + 1024 + 4096)
EXPERT_LAYERS = 4
FILE_BYTES = 512 * MIB


def main() -> None:
    """Write the model, import it, and print the measurements."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.released", description=__doc__)
    parser.add_argument("--gib", type=float, default=3.0, help="GiB of experts in fp32 [3]")
    parser.add_argument("--expert-dtype", default="int8", help="dtype of the imported experts [int8]")
    parser.add_argument("--folder", type=Path, help="where to write [the system's own folder]")
    arguments = parser.parse_args()
    experts = max(2, round(arguments.gib * GIB / EXPERT_BYTES / EXPERT_LAYERS))
    needed = 3 * experts * EXPERT_LAYERS * EXPERT_BYTES + GIB
    folder = Path(tempfile.mkdtemp(prefix="released-", dir=arguments.folder))
    try:
        if (free := shutil.disk_usage(folder).free) < needed:
            sys.exit(f"error: {folder} has {free / GIB:.1f} GiB free; {needed / GIB:.1f} GiB are needed.")
        files = write_model(folder / "hf", experts)
        gib = experts * EXPERT_LAYERS * EXPERT_BYTES / GIB
        print(f"{experts * EXPERT_LAYERS} experts, {gib:.2f} GiB in fp32, {files} files")
        command = [
            sys.executable,
            "-m",
            "fairseq_tutel",
            "convert",
            "from-hf",
            "--input",
            str(folder / "hf"),
        ]
        command += ["--expert-dtype", arguments.expert_dtype, "--output"]
        seconds, peak = sampled([*command, str(folder / "whole")])
        print(f"import: {seconds:.1f} s, peak RssAnon {peak / MIB:.0f} MiB")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_model(folder: Path, experts: int) -> int:
    """Write a random NLLB-MoE in safetensors files, one tensor at a time; return the number of files."""
    folder.mkdir()
    config = {"model_type": "nllb-moe", **SIZES, "num_experts": experts}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    languages = [AddedToken(name, special=True) for name in ("eng_Latn", "fra_Latn")]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(tokens, "<unk>")), bos_token="<s>", eos_token="</s>",
        unk_token="<unk>", pad_token="<pad>", additional_special_tokens=languages,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    options = NLLB_MOE.read_options(config)
    shapes = {row.theirs[0]: dense_shape(row.theirs[0], experts) for row in NLLB_MOE.rows(options)}
    for names, shape in NLLB_MOE.stacks(options).values():
        shapes |= dict.fromkeys(names, shape)
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if sum(4 * torch.Size(own).numel() for own in files[-1].values()) > FILE_BYTES:
            files.append({})
        files[-1][name] = shape
    where = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        layout = {name: (torch.float32, shape) for name, shape in names.items()}
        write_pieces(layout, lambda name: torch.randn(shapes[name]), folder / file)
        where |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return len(files)


def dense_shape(name: str, experts: int) -> tuple[int, ...]:
    """Return the shape of a tensor that does not belong to an expert."""
    dim, hidden = SIZES["d_model"], SIZES["encoder_ffn_dim"]
    if name.endswith("bias") or "norm" in name:
        return (hidden,) if ".fc1." in name else (dim,)
    kinds = {"shared": (SIZES["vocab_size"], dim), "router": (experts, dim), ".fc1.": (hidden, dim)}
    kinds[".fc2."] = (dim, hidden)
    return next((shape for part, shape in kinds.items() if part in name), (dim, dim))


def sampled(command: list[str]) -> tuple[float, int]:
    """Run a command; return (seconds, peak RssAnon)."""
    begin, peak = time.perf_counter(), 0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.002)
        if process.returncode:
            sys.exit(f"error: the import ended with {process.returncode}.")
        return time.perf_counter() - begin, peak


def anonymous_bytes(pid: int) -> int:
    """Return the RssAnon of a process; 0 if the process has ended."""
    try:
        found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    main()
