"""What the fork server does once for its children: each of them has hydra read some 370 options.

hydra parses every option's word anew, by a parser that is slow before it has seen its like, and copies
the store of all configurations, whose entries it copies again when it reads them.
"""

import copy
import functools

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

import fairseq_tutel.models  # noqa: F401

_parse = functools.cache(OverridesParser.create().parse_rule)
OverridesParser.parse_rule = lambda self, word, rule: copy.copy(_parse(word, rule))
ConfigStore.__deepcopy__ = lambda self, memo: self

for words in (
    ["--task", "moe_language_modeling", "--arch", "moe_transformer_lm"],
    ["--task", "moe_translation", "--arch", "moe_transformer"],
):
    parser = options.get_training_parser()
    words = ["data", "--optimizer", "moe_adam", "--criterion", "moe_cross_entropy", *words]
    convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=words))
