"""A translation task with `add_args` instead of a dataclass; the task stores a copy of its arguments."""

import copy

from fairseq.data import Dictionary
from fairseq.tasks import LegacyFairseqTask, register_task
from fairseq.tasks.translation import load_langpair_dataset


@register_task("own_translation")
class OwnTranslationTask(LegacyFairseqTask):
    @staticmethod
    def add_args(parser):
        parser.add_argument("data")

    def __init__(self, args, **kwargs):
        super().__init__(copy.copy(args))
        self.dictionary = Dictionary.load(f"{args.data}/dict.de.txt")

    def load_dataset(self, split, **kwargs):
        self.datasets[split] = load_langpair_dataset(
            self.args.data, split, "de", self.dictionary, "en", self.dictionary, combine=False,
            dataset_impl=None, upsample_primary=1, left_pad_source=True, left_pad_target=False,
            max_source_positions=1024, max_target_positions=1024,
        )  # fmt: skip

    def max_positions(self):
        return 1024, 1024

    @property
    def source_dictionary(self):
        return self.dictionary

    target_dictionary = source_dictionary
