"""A --user-dir with an image classifier that has one hidden layer, for examples/cmcl/compare.py."""

from dataclasses import dataclass, field

from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model
from torch import nn

from fairseq_tutel.plugin import register

register()


@dataclass
class TinyMLPConfig(FairseqDataclass):
    """Sizes of the network."""

    tiny_side: int = field(default=8, metadata={"help": "pixels of a side, to which images are averaged"})
    tiny_hidden: int = field(default=32, metadata={"help": "hidden units"})


@register_model("tiny_mlp", dataclass=TinyMLPConfig)
class TinyMLP(BaseFairseqModel):
    """An image classifier: [B, channels, height, width] -> logits [B, classes]."""

    def __init__(self, channels: int, classes: int, side: int, hidden: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(side)
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, hidden), nn.ReLU())
        self.output = nn.Linear(hidden, classes)

    @classmethod
    def build_model(cls, cfg, task):
        """Build the model with the image size and the classes of a task."""
        return cls(task.channels, task.num_classes, cfg.tiny_side, cfg.tiny_hidden)

    def forward(self, images):
        """Return logits."""
        return self.output(self.hidden(self.pool(images)))
