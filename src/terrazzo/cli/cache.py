"""`terrazzo cache`: the compiled kernels that are kept between runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from terrazzo.cli.output import as_json, say, size
from terrazzo.cli.request import Json

if TYPE_CHECKING:
    from terrazzo.run.cache import Cache

app = typer.Typer(help="The compiled kernels that are kept between runs.", no_args_is_help=True)


@app.command()
def status(json: Json = False) -> None:
    """Where the cache is, how many kernels it holds, and how large it is."""
    found = _cache().status()
    if json:
        as_json(
            {
                "directory": str(found.directory),
                "entries": found.entries,
                "bytes": found.bytes,
                "limit_bytes": found.limit_bytes,
            }
        )
    else:
        say(f"{found.directory}: {_entries(found.entries)}, {size(found.bytes)} of at most {size(found.limit_bytes)}")


@app.command()
def clear() -> None:
    """Remove every entry, and nothing else that lies in the directory."""
    removed = _cache().clear()
    say(f"{removed.directory}: removed {_entries(removed.entries)}, {size(removed.bytes)}")


def _entries(number: int) -> str:
    return f"{number} entr{'y' if number == 1 else 'ies'}"


def _cache() -> Cache:
    from terrazzo.options import Options
    from terrazzo.run.cache import Cache

    options = Options()
    return Cache(options.cache_dir, options.cache_limit)
