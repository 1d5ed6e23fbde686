"""Starts processes quickly from a fork server that has imported the plugin and other slow modules.

All tests share one fork server, because Python allows only one per process.
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
    "torch._dynamo",  # Every torch optimizer imports this slow module.
    "fairseq_tutel.models",  # Importing fairseq_tutel.models registers the plugin.
    "fairseq_tutel.train",
    "fairseq_tutel.run",
    "tests.helpers.warm",
]


def context():
    """Return the multiprocessing context whose children are forked from the fork server.

    A fork of the server starts fast, and the fork is safe because the server has no threads.
    """
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(PRELOADED)  # The fork server skips modules that are not installed.
    return chosen
