"""Which line of the user's program a node of a trace is from."""

from __future__ import annotations

import sys
from typing import Any


def note_line() -> None:
    """Note that what is traced now is from the line of the innermost `forward` that is not PyTorch's, or of PyTorch's
    own where there is no other. It is looked up once for every op that the user's program calls: PyTorch, asked for
    stack traces, reads the lines of all frames for every node, which was a sixth of what capture took.
    """
    from torch.fx.traceback import get_current_meta

    frame: Any = sys._getframe(1)
    found = ""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward":
            own = "/torch/" in code.co_filename or "<eval_with_key>" in code.co_filename
            if not own or not found:
                found = f'File "{code.co_filename}", line {frame.f_lineno}'
            if not own:
                break
        frame = frame.f_back
    get_current_meta()["stack_trace"] = found
