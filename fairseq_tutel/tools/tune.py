"""tune: measure a hardware profile: speed of memory, experts and gate and, under torchrun, of links.

`torchrun --nproc_per_node 8 -m fairseq_tutel tune --output machine.json` measures links, too. `plan
--machine` and --moe-machine-file read the profile. For each repeat, the slowest rank's time counts; the
result is the minimum over repeats.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fairseq_tutel.tools.arguments import DTYPES, aligned, refuse_output, writing
from fairseq_tutel.tools.parser import add_numbers, add_output

if TYPE_CHECKING:
    from fairseq_tutel.parallel.machine import Machine
    from fairseq_tutel.tools.measurements import Row

NUMBERS = (
    ("model_dim", 512, "model dimension"),
    ("hidden_dim", 2048, "hidden dimension of one expert"),
    ("experts", 8, "number of experts per layer, over all ranks"),
    ("top_k", 2, "number of experts per token"),
    ("tokens", 1024, "number of tokens per micro-batch and rank"),
    ("max_mib", 16, "largest all-to-all of a rank, in MiB"),
    ("repeats", 7, "number of timed runs, after one warm-up run"),
)


def add_to(tools: Any) -> None:
    """Add this tool as a subcommand of `python -m fairseq_tutel`."""
    parser = tools.add_parser("tune", description=__doc__, example="--output machine.json")
    add_numbers(parser, NUMBERS)
    text = "dtype of the experts [bf16 on a GPU, else fp32]"
    parser.add_argument("--dtype", choices=DTYPES, help=text)
    add_output(parser, "write the hardware profile to this file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure the hardware profile, print it, and write it to the output file."""
    if arguments.output:
        refuse_output(arguments.output, overwrite=arguments.overwrite)
    from fairseq_tutel.tools.measurements import measured

    found = measured(arguments)
    if found is None:
        return
    machine, rows = found
    print(_page(machine, rows))
    if arguments.output:
        with writing(arguments.output) as file:
            machine.to_json(file)
        print(f"wrote {arguments.output}")


def _page(machine: Machine, rows: list[Row]) -> str:
    """Return the text that the tool prints: the hardware profile, and times of all-to-alls."""
    from fairseq_tutel.parallel.links import exchange_seconds

    facts = [
        [f"{machine.name}: memory, read and written, GB/s", f"{machine.memory_bytes_per_s / 1e9:.2f}"],
        ["experts, forward and backward, TFLOP/s", f"{machine.flops_per_s / 1e12:.4f}"],
        ["gate, TFLOP/s in fp32", f"{machine.gate_flops_per_s / 1e12:.4f}"],
        ["memory of a rank, GB", f"{machine.memory_bytes / 1e9:.1f}"],
    ]
    for name, link in (("within a node", machine.intra), ("between nodes", machine.inter)):
        facts.append([f"message {name}, us", f"{1e6 * link.alpha_s:.1f}"])
        facts.append([f"link {name}, GB/s", f"{link.bytes_per_s / 1e9:.3f}"])
    text = aligned(facts)
    if not rows or all(row.nodes == 1 for row in rows):
        unknown = "links between nodes" if rows else "links"
        text += f"\n\nThese ranks cannot measure {unknown}; their speed above is a typical one."
    if rows:
        table = [["nodes", "ranks of each", "KiB of a rank", "measured, ms", "model, ms"]]
        for nodes, local, num_bytes, seconds in rows:
            predicted = exchange_seconds(num_bytes, machine, nodes, local, "linear")
            times = [f"{1e3 * each:.3f}" for each in (seconds, predicted)]
            table.append([str(nodes), str(local), f"{num_bytes / 1024:g}", *times])
        text += f"\n\n{aligned(table)}"
    return text
