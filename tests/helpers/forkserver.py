"""The fork server of a test session, which has imported the plugin and other slow modules.

Python has one fork server per process, with one list of preloaded modules, so all tests share it.
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
    "torch._dynamo",  # slow, and every torch optimizer imports it
    "fairseq_tutel.models",  # registers the whole plugin
    "fairseq_tutel.train",
    "fairseq_tutel.run",
    "tests.helpers.warm",
]


def context():
    """Return the multiprocessing context whose children are forked from the server.

    Forks of the server are fast, and safe because it has no threads.
    """
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(PRELOADED)  # the server skips modules that are not installed
    return chosen
