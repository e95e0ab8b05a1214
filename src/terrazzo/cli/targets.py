"""`terrazzo targets`: what can be compiled for."""

from __future__ import annotations

from terrazzo.cli.output import as_json, columns, say
from terrazzo.cli.request import Json


def targets(json: Json = False) -> None:
    """List the targets, and whether each works on this machine."""
    from terrazzo.options import Options
    from terrazzo.run.cache import Cache
    from terrazzo.run.compiler import find_compiler
    from terrazzo.targets import TARGETS

    options = Options()
    ready = {"cpu": find_compiler(None, Cache(options.cache_dir, options.cache_limit)) is not None}
    if json:
        as_json([{"name": t.name, "description": t.description, "ready": ready.get(t.name, True)} for t in TARGETS.values()])
        return
    rows = [(t.name, "ready" if ready.get(t.name, True) else "no compiler found", t.description) for t in TARGETS.values()]
    for line in columns(rows):
        say(line)
