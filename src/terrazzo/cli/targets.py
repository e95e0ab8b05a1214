"""`terrazzo targets`: what can be compiled for."""

from __future__ import annotations

from terrazzo.cli.output import as_json, columns, say
from terrazzo.cli.request import Json, here


def targets(json: Json = False) -> None:
    """List the targets, and whether each works on this machine."""
    from terrazzo.options import Options
    from terrazzo.run.cache import Cache
    from terrazzo.run.compiler import find_compiler
    from terrazzo.targets import TARGETS

    options = Options()
    mine = here()
    state = {t.name: "this GPU" if t.name == mine else "to print" for t in TARGETS.values() if t.gpu}
    found = find_compiler(None, Cache(options.cache_dir, options.cache_limit)) is not None
    state |= {"cpu": "ready" if found else "no compiler found", "interpreter": "ready"}
    if json:
        as_json([{"name": t.name, "description": t.description, "state": state[t.name]} for t in TARGETS.values()])
        return
    rows = [(t.name, state[t.name], t.description) for t in TARGETS.values()]
    for line in columns(rows):
        say(line)
