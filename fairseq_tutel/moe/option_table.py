"""Collects the options of models, tasks and criterions from the modules that define them."""

from fairseq_tutel.moe.balance_options import CriterionConfig
from fairseq_tutel.moe.config import LAYER
from fairseq_tutel.moe.model_options import ModelConfig, SidesConfig
from fairseq_tutel.moe.run_options import TaskConfig
from fairseq_tutel.moe.store_options import StoreConfig
from fairseq_tutel.options.option import Option, options_in

BY_OWNER = {
    "model": (*options_in(ModelConfig), *LAYER.values(), *options_in(SidesConfig)),
    "task": (*options_in(TaskConfig), *options_in(StoreConfig), *LAYER.values()),
    "criterion": options_in(CriterionConfig),
}


def options_of(owner: str) -> list[Option]:
    """Return all options of the model, the task or the criterion, in order."""
    return [item for item in BY_OWNER[owner] if item.of == owner]
