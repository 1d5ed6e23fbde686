"""The tables of docs/scaling.md about forms of parallelism: flags, and bytes of a rank by the formula."""

import page
from fairseq_tutel.parallel.cost import held_bytes

# configs/hydra/zcode_64_experts.yaml, counted by tests/e2e/test_recipes.py's way of building it.
DENSE, EXPERTS = 550_574_080, 9_669_574_656
GPUS = 64
# Form, recipe, flags, P, stage, offload.
FORMS = [
    ("data parallel alone", "", "--moe-expert-parallel-size 1", 1, 0, False),
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
    """Return every form with what a rank holds."""
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


def claims_table() -> str:
    """Return what DeepSpeed-MoE's authors say fits, and what the formula gives for it."""
    base = [sum(held_bytes([n], [], w, 1, s)) for n, w, s in ((1.4e9, 1, 0), (15e9, 512, 2))]
    moe = sum(held_bytes([], [400e9 / 512], 512, 512))
    offloaded = held_bytes([], [3.5e12 / 512], 512, 512, stage=2, offload=True)
    on_device = offloaded.weights + offloaded.gradients
    on_gpus = sum(held_bytes([], [3.5e12 / 512], 512, 512, stage=2))
    rows = [
        [
            "a base model of 1.4 B parameters without ZeRO and model parallelism",
            f"{_gigabytes(base[0])} GB a rank",
        ],
        [
            "ten times as large, 15 B, with ZeRO",
            f"{_gigabytes(base[1])} GB a rank of 512 under stage 2",
        ],
        ["400 B parameters in experts on 512 GPUs", f"{_gigabytes(moe)} GB a rank"],
        [
            "8 times as large, 3.5 T, with offload",
            f"{_gigabytes(on_device)} GB a rank and {_gigabytes(offloaded.host)} GB of host memory; "
            f"{_gigabytes(on_gpus)} GB a rank without",
        ],
    ]
    return page.table(rows, ["DeepSpeed-MoE (A100, 80 GB)", "by the formula"])


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:.1f}"
