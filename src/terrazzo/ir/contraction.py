"""Placeholder of the lead's, to be replaced whole by the CPU engineer's recogniser."""

from terrazzo.ir.dialects import loop as l


def contraction(r):
    if r.monoid.name != "sum":
        return None
    b = r.args[0]
    if not (isinstance(b, l.Apply) and b.fn.name == "mul"):
        return None
    f, g = b.args
    return True if (f.free - g.free) or (g.free - f.free) else None
