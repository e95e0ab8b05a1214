"""The meaning of Kernel IR, on numpy.

The warps of a block are teams: each has a program counter, and the warps of a team go step by step together. A block begins as one
team; roles divide it. A team runs until it waits; which of those that can go on goes next is the scheduler's choice, fair or adverse.
Whether an access is ordered after those it conflicts with does not depend on that choice: it is asked of vector clocks
(`clocks`), so a race is found in whatever order it is run. Copies arrive as late as they may.
"""

from terrazzo.interp.kernel.machine import run, run_kernel

__all__ = ["run", "run_kernel"]
