"""Makes the table of docs/scaling.md that lists forms of parallelism with predicted bytes per rank."""

import page
from fairseq_tutel.parallel.cost import held_bytes

# Parameter counts of configs/hydra/zcode_64_experts.yaml, which tests/e2e/test_recipes.py builds.
DENSE, EXPERTS = 550_574_080, 9_669_574_656
GPUS = 64
# Each row has the form, recipe, flags, EP size P, ZeRO stage and offload.
FORMS = [
    ("data parallelism alone", "", "--moe-expert-parallel-size 1", 1, 0, False),
    ("E", "parallel_e", "--moe-expert-parallel-size 64", 64, 0, False),
    ("E + D", "parallel_e_d", "--moe-expert-parallel-size 16", 16, 0, False),
    ("E + Z", "parallel_e_z", "--moe-expert-parallel-size 64 --moe-zero-stage 2", 64, 2, False),
    ("E + D + Z", "", "--moe-expert-parallel-size 16 --moe-zero-stage 2", 16, 2, False),
    (
        "E + D + M, half as many experts of twice the width",
        "parallel_e_d_m",
        "--moe-expert-count 32 --moe-expert-ffn-dim 8192 --moe-expert-parallel-size 64 "
        "--moe-parallel-type model",
        64,
        0,
        False,
    ),
    (
        "E + Z + offload",
        "parallel_e_z_offload",
        "--moe-expert-parallel-size 64 --moe-zero-stage 2 --moe-offload-optimizer",
        64,
        2,
        True,
    ),
]


def forms_table() -> str:
    """Return the table of the bytes that a rank holds, for every form of parallelism."""
    rows = []
    for form, recipe, flags, parallel, stage, offload in FORMS:
        held = held_bytes([DENSE], [EXPERTS // parallel], GPUS, parallel, stage, offload)
        rows.append(
            [
                form,
                f"`{flags}`",
                f"`{recipe}`" if recipe else "-",
                _gigabytes(held.weights),
                _gigabytes(held.gradients),
                _gigabytes(held.state),
                _gigabytes(held.host),
            ]
        )
    header = ["form", "flags", "recipe", "weights, GB", "gradients, GB", "state, GB", "host, GB"]
    return page.table(rows, header)


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:.1f}"
