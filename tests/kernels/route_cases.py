"""The tests of all backends share these inputs and brute-force results of the routing ops."""

import torch
from torch import Tensor

# Each shape is (T, E). Some have no tokens, one expert, an odd size, or tokens for several kernel blocks.
LOGITS = ((0, 3), (1, 1), (1, 8), (63, 1), (63, 3), (63, 5), (63, 8), (63, 100), (1000, 8))


def choices(num_experts: int) -> list[int]:
    """Return the values of K to test: only a few for many experts, because kernels loop over K."""
    few = range(1, num_experts + 1)
    return list(few) if num_experts <= 5 else [1, 2, 8]


def logits(num_tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Draw logits that are multiples of 0.5, so that many experts have equal probabilities."""
    generator = torch.Generator().manual_seed(100 * num_tokens + num_experts)
    return torch.randint(-3, 4, (num_tokens, num_experts), generator=generator).to(dtype) / 2


def best_first(probs_TE: Tensor, top_k: int) -> list[list[int]]:
    """Return the K best experts of every row; NaN is the largest score, and the lower ID wins ties."""
    rows = probs_TE.double().nan_to_num(nan=float("inf")).tolist()
    return [sorted(range(len(row)), key=lambda e, row=row: -row[e])[:top_k] for row in rows]


def asking(top_k: int, num_tokens: int, num_experts: int) -> Tensor:
    """Draw expert IDs [K, T]: 0 is frequent, E - 1 does not occur if E > 1, and E means no expert."""
    generator = torch.Generator().manual_seed(10 * num_tokens + num_experts)
    most = max(num_experts - 1, 1)
    ids_KT = torch.randint(most, (top_k, num_tokens), generator=generator)
    ids_KT[torch.rand(ids_KT.shape, generator=generator) < 0.3] = 0
    ids_KT[torch.rand(ids_KT.shape, generator=generator) < 0.2] = num_experts
    return ids_KT


def order(top_k: int, num_tokens: int) -> Tensor:
    """Draw a random order of all assignments, in which first and later choices are mixed."""
    return torch.randperm(top_k * num_tokens, generator=torch.Generator().manual_seed(num_tokens))


def sentence_first(top_k: int, time: int, batch: int) -> list[int]:
    """Order the assignments of time-first tokens by choice, then by (sentence, time)."""
    tokens = [t * batch + b for b in range(batch) for t in range(time)]
    return [j * time * batch + t for j in range(top_k) for t in tokens]


def by_counting(
    ids_KT: Tensor, copies: list[int], num_experts: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Assign slots in a loop over assignments; return the slots by token and the counts by choice."""
    top_k, num_tokens = ids_KT.shape
    slots = [[-1] * top_k for _ in range(num_tokens)]
    assigned = [[0] * num_experts for _ in range(top_k)]
    taken = [0] * num_experts
    ids = ids_KT.flatten().tolist()
    for copy in copies:
        expert, j, t = ids[copy], copy // num_tokens, copy % num_tokens
        if expert < num_experts:
            slots[t][j] = taken[expert]
            taken[expert] += 1
            assigned[j][expert] += 1
    return slots, assigned


def rows_by_counting(
    ids_TK: Tensor, slots: list[list[int]], limit: int | None, num_experts: int
) -> dict[str, list]:
    """Lay out the rows of all assignments with a slot below the capacity, expert by expert."""
    top_k = ids_TK.shape[1]
    flat = [slot for token in slots for slot in token]
    kept = [slot >= 0 and (limit is None or slot < limit) for slot in flat]
    of_rows = sorted((e, flat[i], i) for i, e in enumerate(ids_TK.flatten().tolist()) if kept[i])
    sources = [i for _, _, i in of_rows]
    row_of = [-1] * len(flat)
    for row, source in enumerate(sources):
        row_of[source] = row
    return {
        "counts": [sum(e == expert for e, _, _ in of_rows) for expert in range(num_experts)],
        "dropped": [
            sum(flat[i] >= 0 and not kept[i] for i in range(j, len(flat), top_k)) for j in range(top_k)
        ],
        "row_of": [row_of[i : i + top_k] for i in range(0, len(flat), top_k)],
        "sources": sources,
    }
