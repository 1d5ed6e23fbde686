"""A --user-dir that loads the plugin, and sleeps $SECONDS_PER_UPDATE before each update."""

import os
import time

from fairseq.trainer import Trainer

from fairseq_tutel.plugin import register

register()


def _slow(original):
    def train_step(self, *args, **kwargs):
        time.sleep(float(os.environ["SECONDS_PER_UPDATE"]))
        return original(self, *args, **kwargs)

    return train_step


Trainer.train_step = _slow(Trainer.train_step)
