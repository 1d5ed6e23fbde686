"""Experts of the user's own: one torch module is one expert; here its tensors are stacked.

R rows, D model_dim, e local experts.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.build import construct, draw
from fairseq_tutel.moe.config import MoEConfig, label_of
from fairseq_tutel.moe.expert_stack import ExpertStack, Tensors
from fairseq_tutel.moe.initial import hashed_seed
from fairseq_tutel.ranks.slices import Part


class CustomExperts(ExpertStack):
    """Runs `kind(config)`, a module that maps rows [n, D] to rows [n, D], for every expert.

    Parameters are stacked by expert under their own names, with __ for a dot, so that they are
    exchanged, saved and resumed as all experts are. Each expert is drawn by its own constructor,
    from a seed of its own.

    Raises:
        ValueError: the module has buffers, which no expert could keep apart, or no parameters.
    """

    def __init__(self, config: MoEConfig, kind: type, part: Part | None = None) -> None:
        super().__init__(config, part)
        self.kind = kind
        with torch.device("meta"):
            template = construct(label_of("expert_type"), kind, config)
        if not isinstance(template, nn.Module) or not list(template.parameters()):
            raise ValueError(f"expert {kind.__name__} has no parameters; give a torch module.")
        if list(template.buffers()):
            raise ValueError(
                f"expert {kind.__name__} has buffers, which experts do not keep apart; make them "
                "parameters, or constants of the class."
            )
        # Not a submodule: it lends its forward, and holds no values.
        self._template = [template]
        for name, parameter in template.named_parameters():
            shape = (self.num_local, *parameter.shape)
            values = torch.empty(shape, dtype=parameter.dtype)
            stacked = nn.Parameter(values, requires_grad=parameter.requires_grad)
            self.register_parameter(_key(name), stacked)

    @torch.no_grad()
    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw each expert by its constructor."""
        stacks = self.expert_parameters()
        if any(stack.is_meta for stack in stacks.values()):
            return
        for i in range(self.num_local):
            own_seed = hashed_seed(seed, name, self.first + i, "expert")
            expert = draw(self.kind, self.config, own_seed)
            for tensor, parameter in expert.named_parameters():
                stacks[_key(tensor)][i].copy_(parameter)

    def run(self, rows_RD: Tensor, groups: Groups, tensors: Tensors) -> Tensor:
        """Run expert i on its group of rows; an expert without rows is not called."""
        (template,) = self._template
        template.train(self.training)
        counts = list(groups.host)
        rows_RD = rows_RD[: sum(counts)]
        # unbind's backward stacks once; indexing would build a zero-filled stack per expert.
        stacks = {name: tensors[_key(name)].unbind(0) for name, _ in template.named_parameters()}

        def run(i: int, rows: Tensor) -> Tensor:
            return functional_call(template, {name: s[i] for name, s in stacks.items()}, (rows,))

        parts = rows_RD.split(counts)
        done = [run(i, rows_i) for i, rows_i in enumerate(parts) if len(rows_i)]
        # No rows at all: an empty run still knows dtype and width of what other ranks send and expect,
        # and gives parameters gradients, of zero.
        out = torch.cat(done) if done else run(0, rows_RD)
        if out.shape != rows_RD.shape:
            raise ValueError(
                f"expert_type (--moe-expert-type) {self.kind.__name__} gives {tuple(out.shape)} for rows "
                f"of shape {tuple(rows_RD.shape)}; let it return the shape it is given."
            )
        return out


def _key(name: str) -> str:
    return name.replace(".", "__")
