"""Runs the console blocks of a page and compares, or replaces, their output.

    ```console
    $ terrazzo targets
    cpu ...
    ```

The commands of a page run in order, in one empty directory. `terrazzo` runs in this process, so that torch is imported
once; what its output is piped into, and any other command, runs in a shell. In the written output `...` stands for
anything, for times and the like; a block that agrees is left as it is.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One command of a block, as written, and the output written below it."""

    written: str
    output: str

    @property
    def line(self) -> str:
        """The command: lines that begin with `> ` go on with it; a backslash before them joins the lines, as in a
        shell.
        """
        return self.written.removeprefix("$ ").replace("\\\n> ", "").replace("\n> ", "\n")

    def agrees(self, found: str) -> bool:
        """Whether the written output is the one found, where `...` is anything."""
        pattern = ".*?".join(map(re.escape, self.output.split("...")))
        return re.fullmatch(pattern, found, re.DOTALL) is not None


def commands(block: str) -> Iterator[Command]:
    """The commands of a block: a line that begins with `$ `, and those after it that begin with `> `."""
    for match in re.finditer(r"^(\$ .*\n(?:> .*\n)*)((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
        yield Command(match[1].rstrip("\n"), match[2])


def rewritten(page: str, directory: Path) -> str:
    """The page with the output of every command as it is now; commands run in `directory`."""

    def block(match: re.Match[str]) -> str:
        parts = []
        for command in commands(match[1]):
            found = output(command.line, directory)
            parts.append(f"{command.written}\n" + (command.output if command.agrees(found) else found))
        return "```console\n" + "".join(parts) + "```"

    return BLOCK.sub(block, page)


def output(line: str, directory: Path) -> str:
    """What a command prints, errors included."""
    own, pipe, rest = line.partition(" | ")
    if not own.startswith("terrazzo "):
        return _shell(line, "", directory)
    text, errors = _terrazzo(shlex.split(own)[1:], directory)
    return (_shell(rest, text, directory) if pipe else text) + errors


def _terrazzo(words: list[str], directory: Path) -> tuple[str, str]:
    import contextlib

    from typer.testing import CliRunner

    from terrazzo.cli.app import app

    with contextlib.chdir(directory):
        done = CliRunner().invoke(app, words, prog_name="terrazzo")
    return done.stdout, done.stderr


def _shell(line: str, given: str, directory: Path) -> str:
    done = subprocess.run(["bash", "-c", line], input=given, cwd=directory, capture_output=True, text=True)
    return done.stdout + done.stderr
