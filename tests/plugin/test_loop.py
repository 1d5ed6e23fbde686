"""The plugin wraps functions of fairseq's training loop in every copy of the module fairseq_cli.train."""

import runpy
import sys
import types
import warnings

from fairseq_tutel import plugin
from fairseq_tutel.plugin.training import loop

plugin.register()


def test_the_training_loop_is_wrapped_in_a_spawned_process(monkeypatch):
    """In a spawned process, multiprocessing runs the main module under the name __mp_main__."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runpy warns, because the module is imported already
        names = runpy.run_module("fairseq_cli.train", run_name="__mp_main__", alter_sys=True)
    module = types.ModuleType("__mp_main__")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "__mp_main__", module)
    stock = module.main.__globals__["train"]
    with loop.wrapping(module.main, train=lambda original: [original]):
        assert module.main.__globals__["train"] == [stock]
    assert module.main.__globals__["train"] is stock
