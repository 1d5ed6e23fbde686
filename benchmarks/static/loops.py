"""Finds the main loop of a compiled kernel in its assembly, and counts its instructions.

The main loop is the innermost loop with matrix instructions (MMA). A kernel that adds two products has two;
the one with the most other instructions per MMA counts.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from triton import knobs

_LABEL = re.compile(r"^\.?(\w+):")
_SASS = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);")
_TARGET = re.compile(r"BRA.*`\(\.(\w+)\)|s_c?branch\w* \.?(\w+)")
_MMA = re.compile(r"\b(\w*MMA(\.|\b)|v_mfma)")
_END = re.compile(r"\s*(EXIT|s_endpgm)")
_BARRIER = re.compile(r"\b(BAR\.SYNC|s_barrier\b)")


@dataclass(frozen=True)
class Loop:
    """The instructions of one iteration, in one warp (on AMD: wave).

    Attributes:
        mma: matrix instructions.
        other: all other instructions, without the branch that closes the loop.
        barriers: instructions that wait for all warps of the program.
    """

    mma: int
    other: int
    barriers: int

    @property
    def ratio(self) -> float:
        """Other instructions per matrix instruction."""
        return self.other / self.mma


def main_loop(compiled: Any) -> Loop | None:
    """Return the main loop of a kernel from `compile_table.build`; None without matrix instructions."""
    return find_main_loop(assembly(compiled))


def find_main_loop(lines: list[str]) -> Loop | None:
    """Return the main loop of assembly lines; see `assembly`."""
    labels = {m[1]: i for i, line in enumerate(lines) if (m := _LABEL.match(line))}
    spans = []
    for i, line in enumerate(lines):
        target = _TARGET.search(line)
        first = labels.get(target[1] or target[2], i) if target else i
        # Code after the end of the kernel waits for a barrier and jumps back; that is no loop.
        if first < i and not any(map(_END.match, lines[first:i])):
            spans.append((first, i))
    spans = [span for span in spans if any(map(_MMA.search, lines[slice(*span)]))]
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    loops = [_counted(lines[slice(*span)]) for span in inner]
    return max(loops, key=lambda loop: loop.ratio, default=None)


def assembly(compiled: Any) -> list[str]:
    """Return the labels and instructions of a compiled kernel: SASS on CUDA, GCN assembly on AMD."""
    if "cubin" not in compiled.asm:
        code = (line.split(";")[0].rstrip() for line in compiled.asm["amdgcn"].splitlines())
        return [line for line in code if _LABEL.match(line) or re.match(r"^\s+[a-z]\w*_", line)]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [m[1] if (m := _SASS.match(line)) else line for line in text.splitlines() if _is_code(line)]


def _is_code(line: str) -> bool:
    return bool(_LABEL.match(line) or _SASS.match(line))


def _counted(lines: list[str]) -> Loop:
    code = [line for line in lines if not _LABEL.match(line)]
    mma = sum(bool(_MMA.search(line)) for line in code)
    return Loop(mma, len(code) - mma, sum(bool(_BARRIER.search(line)) for line in code))
