"""What hydra does again for each command line is done once in a process: a second of each becomes a fifth.

It parses every option's word anew, by a parser that is slow before it has seen its like, and copies the
store of all configurations, whose entries it copies again when it reads them. To learn who called it, it
asks for the source of every caller.
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
