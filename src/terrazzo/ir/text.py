"""The text of every IR: `show` prints, `parse` reads back, and parse(show(p)) == p.

The text is Python syntax. It is read with `ast` and never executed, so editors highlight it and errors have positions.
"""

from terrazzo.ir.parse import parse
from terrazzo.ir.show import show
from terrazzo.ir.show_expr import show_expr, show_type

__all__ = ["parse", "show", "show_expr", "show_type"]
