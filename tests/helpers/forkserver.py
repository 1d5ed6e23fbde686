"""The one fork server of a test session: it has imported what is slow to import, the plugin too.

Python has one such server per process, with one list of preloaded modules, so all tests share it.
"""

import multiprocessing

PRELOADED = [
    "torch",
    "fairseq_cli.train",
    "fairseq_cli.hydra_train",
    "fairseq_cli.preprocess",
    "fairseq_cli.generate",
    "fairseq_cli.interactive",
    "fairseq_cli.eval_lm",
    "fairseq_cli.validate",
    "torch._dynamo",  # every optimizer of torch imports it, which takes longer than a small training
    "fairseq_tutel.models",  # which registers the whole plugin
    "fairseq_tutel.train",
    "fairseq_tutel.run",
    "tests.helpers.warm",
]


def context():
    """Return the multiprocessing context whose children are forked from the server.

    The server has started no thread: its forks are quick and safe.
    """
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(PRELOADED)  # the server passes over what is not installed
    return chosen
