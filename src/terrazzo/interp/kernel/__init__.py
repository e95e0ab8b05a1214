"""The meaning of Kernel IR, on numpy.

The warps of a block are in teams, which go step by step together: all in one, one for each role, or each warp by
itself. A team runs until it waits; which of those that can go on goes next is the scheduler's choice, fair or adverse
(`machine`). Whether an access is ordered after those it conflicts with does not depend on that choice: it is asked of
vector clocks (`clocks`), so a race is found in whatever order it is run. Copies arrive as late as they may.
"""

from terrazzo.interp.kernel.machine import run, run_kernel

__all__ = ["run", "run_kernel"]
