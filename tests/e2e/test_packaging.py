"""The wheel and the sdist have every file of the package, and a model trains without the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from cli import ROOT, tail
from models import lm_args

LEFT_OUT = shutil.ignore_patterns(".venv", ".git", "demo", "build", "dist", "*.egg-info", "__pycache__")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the sdist, built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=LEFT_OUT)
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, folder / "checkout"])
    return folder


def _run(command, **options):
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, tail(done.stdout + done.stderr)
    return done.stdout


def _modules():
    """Return the path inside the wheel of every file of the package."""
    files = {*(ROOT / "fairseq_tutel").rglob("*.py"), *(ROOT / "fairseq_tutel/kernels").glob("*.py")}
    data = {
        "fairseq_tutel/py.typed",
        *(f"fairseq_tutel/tools/{n}/{n}.html.j2" for n in ("report", "tokens")),
    }
    return {str(path.relative_to(ROOT)) for path in files} | data


def test_wheel_and_sdist_hold_every_module_as_a_regular_file(built):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if not n.split("/")[0].endswith("dist-info")}
    assert names == _modules()
    with tarfile.open(sdist) as archive:
        files = {m.name.split("/", 1)[1] for m in archive.getmembers() if m.isfile()}
    assert files >= _modules() | {"setup.py", "pyproject.toml", "LICENSE", "README.md"}
    assert {name.split("/")[0] for name in files}.isdisjoint({"tests", "benchmarks"})


@pytest.mark.long
def test_a_model_trains_in_an_environment_with_only_the_wheel(built, lm_data, tmp_path):
    (wheel,) = built.glob("*.whl")
    _run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"])
    python = tmp_path / "env" / "bin" / "python"
    site = Path(_run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    _run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel])
    # This .pth file makes packages of the tests' environment importable, but not its editable installs.
    (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    somewhere = {"cwd": tmp_path, "env": clean}
    where = _run([python, "-c", "import fairseq_tutel; print(fairseq_tutel.__file__)"], **somewhere)
    assert Path(where.strip()).parent == site / "fairseq_tutel"
    command = tmp_path / "env" / "bin" / "fairseq-tutel"
    assert "see a training run:" in _run([command, "--help"], **somewhere)
    user_dir = _run([command, "user-dir"], **somewhere).strip()
    assert Path(user_dir) == site / "fairseq_tutel"
    words = lm_args(lm_data, tmp_path / "save", "--user-dir", user_dir, updates=3)
    _run([python, "-m", "fairseq_cli.train", *words], **somewhere)
    saved = torch.load(tmp_path / "save" / "checkpoint_last.pt", weights_only=False)
    assert "decoder.layers.0.fc1.experts.fc1_weight" in saved["model"]
