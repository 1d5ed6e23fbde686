"""Tests of `fairseq-tutel env`, which prints versions and devices, with and without fairseq."""

import sys
from importlib.metadata import version

import torch
from tool_in_process import tool

import fairseq_tutel


def _env():
    lines = (line.partition(": ") for line in tool("env").splitlines() if line.startswith("  "))
    return {name.strip(): value for name, _, value in lines}


def test_env_prints_versions_devices_and_unavailable_features():
    facts = _env()
    assert facts["fairseq-tutel"] == fairseq_tutel.__version__
    assert facts["torch"] == version("torch")
    assert facts["fairseq-fixed"].startswith("0.12.")
    assert "gloo" in facts["torch.distributed"]
    if not torch.cuda.is_available():
        assert facts["gpu"].startswith("none found")
        assert facts["kernels (--moe-backend auto)"] == "reference, since: tensors on cpu"
        assert facts["kernels (--moe-backend triton)"].startswith("not available: backend (--moe-backend)")
        assert facts["backend of torch.distributed"].startswith("gloo")
        assert "not --fp16" in facts["precisions"]


def test_env_works_if_fairseq_is_not_installed(monkeypatch):
    for name in ("fairseq", "fairseq.modules.layer_norm"):
        monkeypatch.setitem(sys.modules, name, None)
    assert _env()["torch"] == version("torch")
