"""If ranks have different options, all ranks raise the same error before they exchange tensors."""

import torch.distributed as dist

from fairseq_tutel.parallel.agreement import agree
from fairseq_tutel.parallel.groups import make_topology

FIX = "; start all ranks with the same command, packages and data."


def _error(function, argument_of_rank):
    try:
        function(argument_of_rank[dist.get_rank()])
    except ValueError as error:
        return str(error)
    return "agreed"


def _errors(function, cases):
    """Return the error of each case, and whether ranks agree afterwards."""
    found = [_error(function, case) for case in cases]
    agree({"after": "that"})
    return found


FACTS = {
    "agreed": [{"--a": 1, "--b": [2, "x"]}] * 4,
    "--k is 2 on ranks 0-1, 3 and 1 on rank 2": [{"--k": 2}, {"--k": 2}, {"--k": 1}, {"--k": 2}],
    "--k is a on ranks 0, 3 and b on rank 1 and c on rank 2": [{"--k": k} for k in "abca"],
    'n is "" on rank 0 and missing on ranks 1-3': [{"--k": 1, "n": ""}, *[{"--k": 1}] * 3],
    ", ".join(f"--{n} is 0 on rank 0 and 1 on ranks 1-3" for n in "abc"): [
        {f"--{n}": 0 for n in "edcba"},
        *[{f"--{n}": 1 for n in "abcde"}] * 3,
    ],
    f"--k is {'y' * 80} on rank 0 and x on ranks 1-3": [{"--k": "y" * 500}, *[{"--k": "x"}] * 3],
}


def test_all_ranks_raise_the_same_error(ranks):
    expected = [sentence if sentence == "agreed" else sentence + FIX for sentence in FACTS]
    assert ranks(4).run(_errors, agree, list(FACTS.values())) == [expected] * 4


def _topology(arguments):
    make_topology(*arguments)


TOPOLOGIES = {
    "--moe-expert-parallel-size is 2 on ranks 0, 2-3 and 3 on rank 1": ([4], 3),
    "the number of experts of each layer is [4] on ranks 0, 2-3 and [4, 4] on rank 1": ([4, 4], 2),
    "the number of ranks of a node is 0 on ranks 0, 2-3 and 2 on rank 1": ([4], 2, 2),
}


def test_different_topology_arguments_raise_an_error_before_groups_are_created(ranks):
    usual = ([4], 2)
    cases = [[usual, odd, usual, usual] for odd in TOPOLOGIES.values()]
    expected = [*(sentence + FIX for sentence in TOPOLOGIES), "agreed"]
    assert ranks(4).run(_errors, _topology, [*cases, [usual] * 4]) == [expected] * 4
