"""What the fork server does once for its children: each of them has hydra read some 370 options.

hydra parses every option's word anew, by a parser that is slow before it has seen its like, and copies
the store of all configurations, whose entries it copies again when it reads them. To learn who called it,
it asks for the source of every caller. What was imported tidies up as a process ends, one by one.
"""

import copy
import functools
import gc
import inspect
import weakref

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

import fairseq_tutel.models  # noqa: F401

_parse = functools.cache(OverridesParser.create().parse_rule)
OverridesParser.parse_rule = lambda self, word, rule: copy.copy(_parse(word, rule))
ConfigStore.__deepcopy__ = lambda self, memo: self
inspect.stack = functools.partial(inspect.stack, 0)

for words in (
    ["--task", "moe_language_modeling", "--arch", "moe_transformer_lm"],
    ["--task", "moe_translation", "--arch", "moe_transformer"],
):
    parser = options.get_training_parser()
    words = ["data", "--optimizer", "moe_adam", "--criterion", "moe_cross_entropy", *words]
    convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=words))

for imported in weakref.finalize._registry:
    imported.atexit = False
gc.freeze()  # what the server imported is no garbage: looking through it copies its pages
