"""The predefined configurations of `benchmarks.layer`.

T tokens, D model_dim, H hidden_dim, E experts, K top_k.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer on one micro-batch, without biases, dropless.

    Attributes:
        tokens: T.
        model_dim: D.
        hidden_dim: H, the hidden dimension of one expert.
        num_experts: E.
        top_k: K.
        activation: relu or gelu (two weight matrices), or swiglu (three): silu(x W1) * (x W3).
        zipf: s; experts are drawn with probability proportional to 1 / rank ** s; 0 is uniform.
    """

    tokens: int
    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    activation: str = "relu"
    zipf: float = 0.0

    @property
    def is_glu(self) -> bool:
        """Whether an expert has three weight matrices."""
        return self.activation == "swiglu"

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the experts' matrix products in forward, without the gate."""
        maps = 3 if self.is_glu else 2
        return 2 * maps * self.tokens * self.top_k * self.model_dim * self.hidden_dim

    def tiny(self) -> "Case":
        """Return a small case of the same kind, which runs in milliseconds."""
        return replace(
            self,
            tokens=min(self.tokens, 64),
            model_dim=16,
            hidden_dim=32,
            num_experts=min(self.num_experts, 4),
            top_k=min(self.top_k, 2),
        )


def _cpu(**sizes: Any) -> Case:
    return Case(tokens=4096, model_dim=512, **sizes)


CPU_CASES = {
    "k1_uniform": _cpu(hidden_dim=2048, num_experts=8, top_k=1),
    "k1_zipf": _cpu(hidden_dim=2048, num_experts=8, top_k=1, zipf=1.0),
    "k2_uniform": _cpu(hidden_dim=2048, num_experts=8, top_k=2),
    "k2_zipf": _cpu(hidden_dim=2048, num_experts=8, top_k=2, zipf=1.0),
    "e64_uniform": _cpu(hidden_dim=256, num_experts=64, top_k=8),
    "e64_zipf": _cpu(hidden_dim=256, num_experts=64, top_k=8, zipf=1.0),
}

# Small batches show the cost outside of the products. In the last case, most experts have 0 to 2 rows.
SMALL = {
    f"small_t{tokens}_k{top_k}": replace(CPU_CASES[f"k{top_k}_uniform"], tokens=tokens)
    for tokens in (64, 256, 1024)
    for top_k in (1, 2)
} | {"small_t64_k2_e64": replace(CPU_CASES["k2_uniform"], tokens=64, hidden_dim=1024, num_experts=64)}
# examples/language_model.sh
SMALL["small_recipe"] = Case(tokens=1024, model_dim=128, hidden_dim=256, num_experts=8, top_k=2)
CPU_CASES |= SMALL

_QWEN3 = Case(tokens=32768, model_dim=2048, hidden_dim=768, num_experts=128, top_k=8, activation="swiglu")
CUDA_CASES = {
    # The usual layer size of fairseq.
    "A": Case(tokens=32768, model_dim=1024, hidden_dim=4096, num_experts=8, top_k=1),
    "B": Case(tokens=32768, model_dim=2048, hidden_dim=8192, num_experts=8, top_k=2),
    # The layer of Mixtral.
    "C": Case(tokens=8192, model_dim=4096, hidden_dim=14336, num_experts=8, top_k=2, activation="swiglu"),
    # The layer of OLMoE.
    "D": Case(tokens=32768, model_dim=2048, hidden_dim=1024, num_experts=64, top_k=8, activation="swiglu"),
    # The layer of Qwen3-30B.
    "E": _QWEN3,
    # The layer of SonicMoE's fine-grained 7B model.
    "F": Case(tokens=24576, model_dim=1536, hidden_dim=256, num_experts=128, top_k=8, activation="swiglu"),
    # Case E, but the busiest expert has ten times the mean load.
    "G": replace(_QWEN3, zipf=0.8),
    # Case A with fewer tokens, so that the [T, E, C] masks of the einsum formulation fit into memory.
    "S": Case(tokens=4096, model_dim=1024, hidden_dim=4096, num_experts=8, top_k=1),
}
