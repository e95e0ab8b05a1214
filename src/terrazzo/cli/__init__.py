"""The command line, one file per command. Only here and in `options.py` is the environment read.

torch and the compiler are imported inside the commands, so that `terrazzo --help` is instant.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The console script `terrazzo`; ends the process with the exit code of the command."""
    from terrazzo.cli.app import app

    # --debug may stand anywhere, because one adds it to a line that has just failed.
    words = [w for w in sys.argv[1:] if w != "--debug"]
    app(["--debug", *words] if len(words) < len(sys.argv) - 1 else words, prog_name="terrazzo")
