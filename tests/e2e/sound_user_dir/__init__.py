"""The plugin, and small replacements for soundfile and editdistance if they are not installed."""

import sys
import wave
from types import ModuleType

import numpy as np

from fairseq_tutel.plugin import register


def _read(path, dtype="float32"):
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        return samples.astype(dtype) / 32768, file.getframerate()


def _edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(last + (x != y), row[j] + 1, row[j - 1] + 1)
    return row[-1]


for _name, _functions in (("soundfile", {"read": _read}), ("editdistance", {"eval": _edit_distance})):
    try:
        __import__(_name)
    except ImportError:
        sys.modules[_name] = ModuleType(_name)
        vars(sys.modules[_name]).update(_functions)

register()
