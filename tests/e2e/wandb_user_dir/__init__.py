"""A --user-dir that loads the plugin and, in place of W&B, writes what it is given to the file $LOGGED."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

from fairseq.logging import progress_bar

from fairseq_tutel.plugin import register

register()

_config, _logged = {}, {}


def _log(stats, step):
    _logged.update(stats)
    Path(os.environ["LOGGED"]).write_text(json.dumps([sorted(_config), step, _logged]))


progress_bar.wandb = SimpleNamespace(init=lambda **_: None, config=_config, log=_log)
