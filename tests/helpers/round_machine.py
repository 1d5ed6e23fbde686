"""A hardware profile with round numbers, for tests of the cost model."""

from fairseq_tutel.parallel.machine import Link, Machine

ROUND = Machine(
    name="round",
    intra=Link(1.0, 100.0),
    inter=Link(10.0, 10.0),
    memory_bytes_per_s=1000.0,
    flops_per_s=1e6,
    gate_flops_per_s=1e5,
    memory_bytes=1e9,
    launch_s=0.5,
)
