"""Replaces the FFN of a stock fairseq transformer layer by experts.

After fairseq builds the stock model, a MoEFeedForward replaces fc1 of each chosen layer, and identity
functions replace the rest of the FFN. The forward method of the stock layer is unchanged. Shape suffixes
are T (tokens) and D (model_dim).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_tutel.checkpoint.saved import layer_label
from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.moe.build import seeded_generator
from fairseq_tutel.moe.call import Call
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.decode import can_defer
from fairseq_tutel.moe.expert_stack import OWN, ExpertStack
from fairseq_tutel.moe.layer import MoELayer, MoEOutput
from fairseq_tutel.moe.metrics import RoutingCounts, count_routing
from fairseq_tutel.parallel.groups import Topology

# Names of the dropout module between fc1 and fc2 in transformers, lightconv and wav2vec2.
DROPOUTS = ("activation_dropout_module", "relu_dropout_module", "dropout2")
# Attribute paths of the encoder and decoder layer stacks in stock models.
SIDES = ("encoder", "decoder")
STACKS = [
    (side, f"{side}.{name}")
    for side in SIDES
    for name in ("layers", "sentence_encoder.layers", "transformer_layers")
]
# Attribute paths of the layers of a pretrained model inside another model.
STACKS += [("encoder", f"{name}.w2v_model.encoder.layers") for name in ("encoder", "w2v_encoder")]
# MoEConfig fields whose values come from the FFN of the stock layer.
FACTS = ("model_dim", "hidden_dim", "activation", "activation_dropout", "hidden_layer_norm")

# Names of the two losses whose gradients MoE layers add in the backward pass.
BALANCE, BUDGET = "balance", "budget"
Coefficients = Mapping[tuple["MoEFeedForward", str], Tensor]


class Context:
    """State that all MoE layers of one model share; the fairseq integration sets it.

    Args:
        trains: whether the model is trained, rather than opened for inference.
        gather: gathers all experts on this rank, for generation during training with expert parallelism.
        wait_for_turn: blocks until all ranks call the same layer, for ranks that run at different speeds.
        local_drop: probability with which a layer sends no rows in a training update.
        seed: seed of the random numbers for local_drop, the same on all ranks.
    """

    def __init__(
        self,
        trains: bool = False,
        gather: Callable[[], object] | None = None,
        wait_for_turn: Callable[["MoEFeedForward"], None] | None = None,
        local_drop: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.trains, self.gather, self.wait_for_turn = trains, gather, wait_for_turn
        # A dummy batch lets this rank join the collectives; its tokens are neither routed nor counted.
        self.is_dummy = False
        # The bool padding mask [batch, time] of the last batch, for layers that are called without a mask.
        self.padding_mask: Tensor | None = None
        self.local_drop, self.seed, self._update = local_drop, seed, 0
        # Coefficients of the layers' losses in the current backward pass, by layer and name of the loss.
        self.coefficients: Coefficients = {}

    def begin_step(self, is_dummy: bool = False, update: int = 0) -> None:
        """Begin a training step of update number `update`; `is_dummy` is true for dummy batches."""
        self.is_dummy, self._update = is_dummy, update

    def keeps_rows(self, layer: "MoEFeedForward") -> bool:
        """Return whether a layer sends no rows in the current training update (--moe-local-drop).

        The decision depends only on seed, layer and update, so it is equal on all ranks and after a resume.
        """
        if not (self.local_drop and layer.training and layer.calls is not None):
            return False
        generator = seeded_generator(self.seed, layer.name, self._update, "local_drop")
        return bool(torch.rand((), generator=generator) < self.local_drop)

    def see_padding(self, embedding: Any, args: tuple) -> None:
        """Store the padding mask of token ids; this method is a forward pre-hook of the embedding."""
        self.padding_mask = args[0].eq(embedding.padding_idx)

    def begin_backward(self, coefficients: Coefficients) -> None:
        """Set the coefficients of the MoE layers' losses for a backward pass, until `end_backward`."""
        self.coefficients = {**self.coefficients, **coefficients}

    def end_backward(self) -> None:
        """Remove the loss coefficients, so a later backward pass adds no balance loss or budget loss."""
        self.coefficients = {}


@dataclass(frozen=True, kw_only=True)
class MoERecord:
    """The detached losses and routing counts of one MoE layer in one micro-batch."""

    balance_loss: Tensor
    losses: dict[str, Tensor]
    cmr_sum: Tensor | None
    tally: RoutingCounts


class MoEFeedForward(MoELayer):
    """A MoE layer that takes the place of fc1 in a fairseq transformer layer.

    The input and the output are [time, batch, D] or [batch, time, D].

    The balance loss is not part of a MoE layer's output y. The backward of y adds the balance loss's
    gradient, times a coefficient that the criterion's loss node sets at the start of the backward pass. The
    balance loss's gradient is thus correct with activation checkpointing, with fp16's loss scale, and for
    dummy batches, whose loss is 0. The backward of y adds the budget loss's gradient in the same way.
    """

    _record: MoERecord | MoEOutput  # The record of the last micro-batch.
    # Whether the current micro-batch's forward has run; a second forward is a recomputation. If `seen` were
    # a counter, torch.compile would recompile for each micro-batch.
    seen: bool = False

    def __init__(
        self,
        config: MoEConfig,
        topology: Topology,
        seed: int,
        name: str,
        context: Context | None = None,
        experts: ExpertStack | None = None,
        batch_first: bool = False,
    ) -> None:
        super().__init__(config, topology, seed=seed, name=name, experts=experts)
        self.label = layer_label(name)
        self.batch_first = batch_first
        # All calls of a layer use one gate; the layer's other gates need no gradients. If unused gates
        # needed gradients, data parallelism would wait for them, and weight decay would apply to them.
        for i, gate in enumerate([self.gate, *self.other_gates]):
            gate.requires_grad_(i == config.gate_index)
        self.context = context or Context()
        # The stock layer's arguments are kept for recomputation in backward.
        self._padding_mask: Tensor | None = None
        self._generates = False

    def become_member(self, number: int, seed: int | None) -> None:
        """Make this layer part of ensemble member `number`; with a seed, initialize the layer again."""
        self.name, self.label = f"members.{number}.{self.name}", f"member{number}_{self.label}"
        if seed is not None:
            self.reset_parameters(seed, self.name)

    def begin_micro_batch(self) -> None:
        """Mark the layer's next forward as a new micro-batch, not as a recomputation."""
        self.seen = False

    def begin_call(self, padding_mask: Tensor | None = None, generates: bool = False) -> None:
        """Store the arguments of the stock layer's call, which a later recomputation needs."""
        self._padding_mask, self._generates = padding_mask, generates

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return the experts' output for x [time, batch, D] or [batch, time, D]; 0 for padding tokens."""
        self._prepare_ranks()
        mask, time_first, is_new = self._mask_of(x), not self.batch_first, not self.seen
        call = Call.of(x, self.config.model_dim, mask, time_first, is_new=is_new)
        x_TD = call.tokens(x)
        routing = self.routing_of(x_TD, call)
        y = self.apply_routing(x_TD, routing, self.context.keeps_rows(self)).view(x.shape)
        output = self.balance(routing)
        if is_new:
            self._record = output if can_defer(self.training) else _recorded(output)
            self.seen = True
        if torch.is_grad_enabled():  # In evaluation, `record` computes losses later.
            for loss, name in (output.balance_loss, BALANCE), (output.cmr_sum, BUDGET):
                if loss is not None and loss.requires_grad:
                    y = _InjectLoss.apply(y, loss, self, name)
        return y

    @property
    def record(self) -> MoERecord:
        """Losses and routing counts of the last micro-batch; evaluation computes them on first access."""
        if isinstance(self._record, MoEOutput):
            self._record = _recorded(self._record)
        return self._record

    def _prepare_ranks(self) -> None:
        """In evaluation, wait for the other ranks or, to generate in a training run, gather all experts."""
        context = self.context
        if self.training:
            if self.experts.weights.of_all:
                self.experts.compute_with(OWN)
            return
        if context.wait_for_turn is not None:
            context.wait_for_turn(self)
        if self._generates and context.gather is not None and not self.experts.weights.of_all:
            context.gather()

    def _mask_of(self, x: Tensor) -> Tensor | None:
        if not self.context.is_dummy:
            return self._padding_mask
        shape = x.shape[:2] if self.batch_first else (x.shape[1], x.shape[0])
        return torch.ones(shape, dtype=torch.bool, device=x.device)


class _InjectLoss(torch.autograd.Function):
    """An identity function whose backward pass also adds the gradient of one of the MoE layer's losses."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, layer: MoEFeedForward, name: str) -> Tensor:
        ctx.layer, ctx.loss_name, ctx.dtype = layer, name, loss.dtype
        return y.view_as(y)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        coefficient = ctx.layer.context.coefficients.get((ctx.layer, ctx.loss_name))
        return dy, None if coefficient is None else coefficient.to(ctx.dtype), None, None


def _recorded(output: MoEOutput) -> MoERecord:
    return MoERecord(
        balance_loss=output.balance_loss.detach(),
        losses={name: loss.detach() for name, loss in output.losses.items()},
        cmr_sum=None if output.cmr_sum is None else output.cmr_sum.detach(),
        tally=count_routing(output.routing),
    )


def moe_layers(model: nn.Module) -> list[MoEFeedForward]:
    """Return a model's MoE layers in the model's order; the model may be wrapped for data parallelism."""
    return [m for m in model.modules() if isinstance(m, MoEFeedForward)]


def unwrapped(model: Any) -> Any:
    """Return the model without its data-parallel wrappers."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


def contexts_of(layers: Iterable[MoEFeedForward]) -> set[Context]:
    """Return the different Context objects of the given MoE layers."""
    return {layer.context for layer in layers}


def children_of(layers: nn.Module) -> Sequence[nn.Module]:
    """Return all layers of a module list, including those that LayerDrop would skip at random."""
    return list(layers._modules.values())  # type: ignore[arg-type]


def replace_ffn(
    layer: Any,
    config: MoEConfig,
    topology: Topology,
    seed: int,
    name: str,
    context: Context,
    experts: ExpertStack | None = None,
) -> None:
    """Replace the FFN of one stock layer by experts, in place.

    The stock layer must have fc1, fc2 and a dropout between fc1 and fc2. The layer's attribute
    `batch_first` must be true if the layer calls fc1 with [batch, time, D]. If the layer already has
    experts, for example of a pretrained model, the weights of these experts are kept. `name` is the
    qualified name of fc1, which determines the experts' seeds. If `experts` is None, new experts are built.
    """
    batch_first = getattr(layer, "batch_first", False)
    moe = MoEFeedForward(config, topology, seed, name, context, experts, batch_first)
    before = layer.fc1
    layer.fc1 = moe
    if isinstance(before, MoEFeedForward):
        if experts is None:
            moe.load_state_dict(before.state_dict())
        return
    if hasattr(layer, "activation_fn"):
        layer.activation_fn, layer.fc2 = _identity, nn.Identity()
    else:
        moe.register_forward_hook(_both_signs)
        layer.fc2 = _Difference()
    setattr(layer, _dropout_of(layer), nn.Dropout(0.0))
    if getattr(layer, "ffn_layernorm", None) is not None:
        layer.ffn_layernorm = None
    layer.register_forward_pre_hook(_keep_arguments, with_kwargs=True)


def layer_facts(layer: Any, activation: str) -> dict[str, Any]:
    """Return the MoEConfig fields that the FFN of a transformer layer determines, such as hidden_dim."""
    if isinstance(layer.fc1, MoEFeedForward):
        config = layer.fc1.config
        return {name: getattr(config, name) for name in FACTS}
    return {
        "model_dim": layer.fc1.in_features,
        "hidden_dim": layer.fc1.out_features,
        "activation": str(activation),
        "activation_dropout": float(getattr(layer, _dropout_of(layer)).p),
        "hidden_layer_norm": getattr(layer, "ffn_layernorm", None) is not None,
    }


def _dropout_of(layer: Any) -> str:
    return next(name for name in DROPOUTS if hasattr(layer, name))


def _identity(x: Tensor) -> Tensor:
    return x


def _both_signs(_: nn.Module, __: Any, y: Tensor) -> Tensor:
    """Concatenate y and -y, so that the stock layer's built-in ReLU loses no negative values."""
    return torch.cat([y, -y], dim=-1)


class _Difference(nn.Module):
    """Module that recovers y from relu(y) and relu(-y); the gradient is exact where y is not 0."""

    def forward(self, x: Tensor) -> Tensor:
        positive, negative = x.chunk(2, dim=-1)
        return positive - negative


def _keep_arguments(layer: Any, args: tuple, kwargs: dict) -> None:
    # A decoder layer gets the padding mask as the keyword self_attn_padding_mask. An encoder layer gets the
    # mask as the second argument, or as the keyword encoder_padding_mask or self_attn_padding_mask.
    if hasattr(layer, "encoder_attn"):
        given = "self_attn_padding_mask" in kwargs
        mask = kwargs["self_attn_padding_mask"] if given else layer.fc1.context.padding_mask
        state = kwargs.get("incremental_state", args[3] if len(args) > 3 else None)
    else:
        mask = kwargs.get("self_attn_padding_mask", args[1] if len(args) > 1 else None)
        mask = kwargs.get("encoder_padding_mask", mask)
        state = None
    layer.fc1.begin_call(mask, generates=state is not None)


def watch_padding(decoder: Any) -> None:
    """Register a hook that stores a decoder's padding mask, which lightconv layers do not receive."""
    for context in contexts_of(moe_layers(decoder)):
        decoder.embed_tokens.register_forward_pre_hook(context.see_padding)


def models_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the inner models of a multilingual model by name prefix, or {"": model} for other models."""
    parts = getattr(model, "models", None)
    if not isinstance(parts, nn.ModuleDict):
        return {"": model}
    return {f"models.{name}.": part for name, part in parts.items()}


def named_stacks(model: Any) -> Iterable[tuple[str, str, nn.Module]]:
    """Return each stack of layers that may get experts, as (encoder or decoder, qualified name, layers).

    A model can define its layer stacks in a method `moe_stacks`.
    """
    return model.moe_stacks() if hasattr(model, "moe_stacks") else _stock_stacks(model)


def _stock_stacks(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield each stack of layers of a fairseq model, as (encoder or decoder, qualified name, layers)."""
    modules = dict(model.named_modules())  # A shared module is listed once.
    for prefix in models_of(model):
        for side, name in STACKS:
            if f"{prefix}{name}" in modules:
                yield side, f"{prefix}{name}", modules[f"{prefix}{name}"]
