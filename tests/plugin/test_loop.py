"""Functions of fairseq's training loop are wrapped in the globals of its main function."""

import runpy
import sys
import types
import warnings

from fairseq_tutel import plugin
from fairseq_tutel.plugin.training import loop

plugin.register()


def test_the_training_loop_is_wrapped_in_a_process_spawned_by_python_m(monkeypatch):
    """multiprocessing runs the main module again, and copies its names to another module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the module is imported already
        names = runpy.run_module("fairseq_cli.train", run_name="__mp_main__", alter_sys=True)
    module = types.ModuleType("__mp_main__")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "__mp_main__", module)
    stock = module.main.__globals__["train"]
    with loop.wrapping(module.main, train=lambda original: [original]):
        assert module.main.__globals__["train"] == [stock]
    assert module.main.__globals__["train"] is stock
