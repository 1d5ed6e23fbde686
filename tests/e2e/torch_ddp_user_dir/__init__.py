"""A --user-dir that loads the plugin and wraps the model in torch's DistributedDataParallel."""

from fairseq.models import distributed_fairseq_model
from torch.nn.parallel import DistributedDataParallel

from fairseq_tutel.plugin import register

register()


def wrap(module, process_group, buffer_size):
    print("in torch's DistributedDataParallel")
    return DistributedDataParallel(module, process_group=process_group)


distributed_fairseq_model.LegacyDistributedDataParallel = wrap
