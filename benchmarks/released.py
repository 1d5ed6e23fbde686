"""Memory and time of importing a released NLLB-MoE, also after a kill in the middle.

The script writes a random NLLB-MoE with --gib GiB of experts in fp32. Each import runs in its own process,
whose anonymous memory (RssAnon) is sampled from outside. The first import is complete. The second one is
killed (SIGKILL) after half of its steps and started again. Both results must have the same bytes.

    python -m benchmarks.released --gib 3 --expert-dtype int8
"""

import argparse
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fairseq_tutel.checkpoint.shards import write_pieces
from fairseq_tutel.convert.released.families.nllb_moe import NLLB_MOE
from fairseq_tutel.convert.released.unfinished import JOURNAL, SUFFIX

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
    """Write the model, import it twice, and print the measurements."""
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
        whole, again = folder / "whole", folder / "again"
        seconds, peak, text = sampled([*command, str(whole)])
        print(f"import: {seconds:.1f} s, peak RssAnon {peak / MIB:.0f} MiB")
        steps = int(re.findall(r"^\d+ of (\d+): ", text, re.M)[-1])
        journal = again.with_name(again.name + SUFFIX) / JOURNAL
        seconds, peak, _ = sampled([*command, str(again)], lambda: lines(journal) > steps // 2)
        done = lines(journal) - 1
        print(
            f"killed: {seconds:.1f} s, {done} of {steps} steps finished, peak RssAnon {peak / MIB:.0f} MiB"
        )
        seconds, peak, _ = sampled([*command, str(again)])
        print(f"continued: {seconds:.1f} s, peak RssAnon {peak / MIB:.0f} MiB")
        same = digests(whole) == digests(again)
        print("the bytes are equal" if same else "the bytes differ")
        sys.exit(not same)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_model(folder: Path, experts: int) -> int:
    """Write a random NLLB-MoE in safetensors files, one tensor at a time; return the number of files."""
    folder.mkdir()
    config = {"model_type": "nllb-moe", **SIZES, "num_experts": experts}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "__eng_Latn__": 4, "__fra_Latn__": 5}
    (folder / "vocab.json").write_text(json.dumps(tokens))
    options = NLLB_MOE.read_options(config)
    shapes = {row.theirs[0]: dense_shape(row.theirs[0], experts) for row in NLLB_MOE.rows(options)}
    for layer in NLLB_MOE.moe_layers(options):
        rows = NLLB_MOE.expert_rows(layer, experts)
        shapes |= {row.theirs: NLLB_MOE.expert_shape(row.stack, options) for row in rows}
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


def sampled(command: list[str], stop: Callable[[], bool] = lambda: False) -> tuple[float, int, str]:
    """Run a command, and kill it as soon as `stop` returns True; return (seconds, peak RssAnon, output)."""
    begin, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output, subprocess.Popen(command, stdout=output) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            if stop():
                process.send_signal(signal.SIGKILL)
                process.wait()
                break
            time.sleep(0.002)
        if process.returncode not in (0, -signal.SIGKILL):
            sys.exit(f"error: the import ended with {process.returncode}.")
        output.seek(0)
        return time.perf_counter() - begin, peak, output.read()


def anonymous_bytes(pid: int) -> int:
    """Return the RssAnon of a process; 0 if the process has ended."""
    try:
        found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def lines(path: Path) -> int:
    """Return the number of lines of a file; 0 if it does not exist."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


if __name__ == "__main__":
    main()
