"""Hostile texts: what edits or malice make of real stages, and a process in which every command is tried on them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.texts import WORDS, _character, _line, _word, corpus

ROOT = Path(__file__).parents[2]
LIMIT = 120
"""Seconds for all commands on one text."""

NAMES = (
    *("int", "float", "register", "asm", "template", "main", "z", "N", "M_PI_2", "block", "warp", "lane", "threadIdx"),
    *("__global__", "i8", "exp2", "x_p", "größe", "переменная", "shared", "bad", "NULL"),
)
CALLS = (
    *("aten.from_file.default('CANARY', True, 40)", "aten.add_.Tensor(x, x)", "aten.resize_.default(x, [1000000])"),
    *("aten._reshape_alias.default(x, [1000000], [1])", "aten.set_.source_Tensor(x, x)", "aten.item.default(x)"),
    *("aten.as_strided.default(x, [1000000], [1])", "aten.empty.memory_format([1000000000000])"),
    *("aten.relu.default(x)", "aten.relu_.default(x)", "aten.bernoulli.default(x)", "os.system.default('touch owned')"),
    *("aten._print.default('x')", "aten.index.Tensor(x, [x])", "aten.view.default(x, [-1, 7])"),
    "aten.to.dtype_layout(x, device=torch('device:meta'))",
)
NUMBERS = (-1, 0, 1, 2, 7, 31, 64, 1000, 1_000_000, 1 << 31, 1 << 40, 1 << 63, 10**20)


@st.composite
def hostile(draw: Any) -> str:
    """A text of the corpus with up to three things changed, most of them such that it still reads."""
    text: str = draw(st.sampled_from([x for x in corpus() if len(x) < 6000]))
    for _ in range(draw(st.integers(1, 3))):
        edit = draw(st.sampled_from((*EDITS, *EDITS, _word, _line, _character)))
        text = edit(draw, text)
    return text


def _number(draw: Any, text: str) -> str:
    """One number changed: by one, doubled, negated, or into another."""
    found = list(re.finditer(r"(?<![\w.'])\d+(?![\w.'])", text))
    if not found:
        return text
    at = draw(st.sampled_from(found))
    n = int(at[0])
    other = int(draw(st.sampled_from(found))[0])
    number = draw(st.sampled_from(NUMBERS))
    new = draw(st.sampled_from((n + 1, n - 1, n + 1, n - 1, 2 * n, -n, n + 1000, other, number)))
    return text[: at.start()] + str(new) + text[at.end() :]


def _everywhere(draw: Any, text: str) -> str:
    """One name changed in all places."""
    names = sorted(set(re.findall(r"\b[a-z_]\w*(?=: |\[|=[a-z]+\d+\[)", text)))
    if not names:
        return text
    return re.sub(rf"\b{re.escape(draw(st.sampled_from(names)))}\b", draw(st.sampled_from(NAMES)), text)


def _strides(draw: Any, text: str) -> str:
    """Strides for a type, plain ones or wild."""
    found = list(re.finditer(r"\b[a-z]+\d+\[([\d, ]+)\]", text))
    if not found:
        return text
    at = draw(st.sampled_from(found))
    rank = at[1].count(",") + 1
    steps = [draw(st.sampled_from((0, 1, 1, 2, 3, 8, 64, 200, 10_000, -1, 1 << 40, 1 << 62))) for _ in range(rank)]
    if draw(st.booleans()):  # room enough for all
        steps = [draw(st.integers(1, 3)) * 4096 ** (rank - 1 - d) for d in range(rank)] if rank < 3 else steps
    return f"{text[: at.end()]} @ ({', '.join(map(str, steps))},){text[at.end() :]}"


def _index(draw: Any, text: str) -> str:
    """An index moved, scaled, reversed, wrapped or made to come from elsewhere."""
    found = list(re.finditer(r"(?<=[\[ (])(?:[airt]\d+|lane|warp|block)(?=[\],) ])", text))
    if not found:
        return text
    at, other = draw(st.sampled_from(found)), draw(st.sampled_from(found))[0]
    k = draw(st.sampled_from(NUMBERS))
    forms = (
        *("({v} + {k})", "({v} - 1)", "({v} + 1)", "({k} - {v})", "{v} * {k}", "{v} // {k}", "{v} % {k}"),
        *("{v} // {o}", "{v} % ({o} + 1)", "{o}", "{v} * {o}", "({v} + {o})", "{k}", "({v} + {k}) % 8"),
        "at(x[{v}], {k})",
    )
    new = draw(st.sampled_from(forms)).format(v=at[0], k=k, o=other)
    return text[: at.start()] + new + text[at.end() :]


def _guard(draw: Any, text: str) -> str:
    """A guard dropped or added."""
    found = list(re.finditer(r" if [^\n]* >= 0 else 0", text))
    if found and draw(st.booleans()):
        at = draw(st.sampled_from(found))
        return text[: at.start()] + text[at.end() :]
    loads = list(re.finditer(r"(?<= = )\w+\[[^\n\]]*\](?=\n)", text))
    if not loads:
        return text
    at = draw(st.sampled_from(loads))
    inner = re.findall(r"[air]\d+", at[0]) or ["0"]
    v, k = draw(st.sampled_from(inner)), draw(st.sampled_from(NUMBERS))
    condition = draw(st.sampled_from((f"{v} - {k}", f"{k} - {v}", f"{v} * {v} - {k}")))
    return f"{text[: at.end()]} if {condition} >= 0 else 0{text[at.end() :]}"


def _call(draw: Any, text: str) -> str:
    """A call of PyTorch that is another."""
    found = list(re.finditer(r"aten\.\w+\.\w+\(.*\)|(?<== )call\(.*\)", text))
    call = draw(st.sampled_from(CALLS))
    if found:
        at = draw(st.sampled_from(found))
        return text[: at.start()] + call + text[at.end() :]
    line = re.sub(r"^([\w.]+)\((.*)\)$", r"    q9, = call('\1', \2, _types=(f32[1000],))", call)
    return re.sub(r"(?m)^    return", lambda m: f"{line}\n{m[0]}", text)


def _comment(draw: Any, text: str) -> str:
    """A comment that ends badly."""
    lines = text.split("\n")
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] += "  # " + draw(st.sampled_from(("x \\", "*/ int", "a.py:3 \\\\", "??/", "é\\", "\\ ")))
    return "\n".join(lines)


def _mark(draw: Any, text: str) -> str:
    """A byte-order mark, or a wide word."""
    return "\ufeff" + text if draw(st.booleans()) else text.replace("0", draw(st.sampled_from(WORDS)), 1)


EDITS = (_number, _number, _index, _index, _everywhere, _strides, _guard, _call, _comment, _mark)


class Crashed(Exception):
    """The process died: the sanitizer's report."""


class Victim:
    """A process that runs commands on texts. Files that nothing may touch lie beside them."""

    def __init__(self, trusting: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="terrazzo-hostile-"))
        self.work = self.folder / "work"
        self.work.mkdir()
        self.canary = self.work / "canary"
        self.canary.write_bytes(b"do not touch me!")
        self.trusting = trusting
        self.process: Any = None

    def start(self) -> Any:
        """The process, begun where it is not there."""
        if self.process is None or self.process.poll() is not None:
            compiler = self.folder / "c++"
            compiler.write_text(
                '#!/bin/sh\ncase "$*" in *--version*) exec c++ "$@" ;; esac\n'
                'exec c++ "$@" -O0 -fsanitize=address -fno-omit-frame-pointer -w\n'
            )
            compiler.chmod(0o755)
            environment = {
                **os.environ,
                "LD_PRELOAD": library(),
                "ASAN_OPTIONS": "detect_leaks=0:max_allocation_size_mb=512:allocator_may_return_null=1",
                "TERRAZZO_CACHE_DIR": str(self.folder / "cache"),
                "TERRAZZO_COMPILER": str(compiler),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            }
            self.log = (self.folder / "log").open("w+")
            words = [sys.executable, "-m", "tests.fuzz.victim", *(["--trusting"] if self.trusting else [])]
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment,
                cwd=self.work,
            )  # fmt: skip
        return self.process

    def run(self, text: str, commands: list[list[str]]) -> list[tuple[int, str]]:
        """(exit code, what it said) of each command; FILE stands for the text. Crashed where the process died."""
        process = self.start()
        file = self.folder / "text.txt"
        file.write_bytes(text.replace("CANARY", str(self.canary)).encode("utf-8", "surrogatepass"))
        given = [[str(file) if word == "FILE" else word for word in words] for words in commands]
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        line = _line_within(process, LIMIT)
        if line is None:
            self.stop()
            return [(124, "too long")]
        if not line:
            process.wait()
            self.log.seek(0)
            report = self.log.read()
            told = report[max(report.find("ERROR: AddressSanitizer"), 0) :].splitlines()[:20]
            raise Crashed("\n".join([*told, f"the process died ({process.returncode})"]))
        answers = [(code, said) for code, said in json.loads(line)]
        if self.canary.read_bytes() != b"do not touch me!" or [p.name for p in self.work.iterdir()] != ["canary"]:
            raise Crashed(f"a file was touched: {list(self.work.iterdir())}")
        return answers

    def stop(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Ends the process, and removes its files."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _line_within(process: Any, seconds: float) -> str | None:
    """A line that a process prints, "" where it ended, None where it takes longer."""
    import select

    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else None


@cache
def library() -> str:
    """What is loaded before all else: the sanitizer, and the library of C++ whose exceptions it looks at; "" where
    there is none.
    """
    compiler = shutil.which("c++")
    names = ("libasan.so", "libstdc++.so.6") if compiler else ()
    said = [subprocess.run([str(compiler), f"-print-file-name={n}"], capture_output=True, text=True) for n in names]
    found = [x.stdout.strip() for x in said]
    return ":".join(found) if found and all(os.path.isabs(x) and os.path.exists(x) for x in found) else ""


@cache
def victim() -> Victim:
    """The process that all texts are tried in."""
    import atexit

    found = Victim()
    atexit.register(found.close)
    return found
