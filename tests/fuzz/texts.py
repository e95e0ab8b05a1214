"""Random texts: real stages of all IRs, with characters, words and lines of them changed."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st

from terrazzo.front.capture import capture
from terrazzo.ir.text import show
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from tests.fuzz.schedules import SMALL
from tests.kernels.programs import CASES

SUBJECTS = (
    *(("matmul of bfloat16", target) for target in ("sm_75", "sm_80", "sm_90a")),
    *(
        (name, "sm_90a")
        for name in (
            "softmax",
            "argmax of few values",
            "cumsum",
            "gather",
            "cat",
            "conv1d",
            "swiglu of float",
            "variance",
            "any",
        )
    ),
)
IRS = ("torch", "tensor", "loop", "tile", "kernel")

WORDS = (
    *(
        "0",
        "-1",
        "1",
        "31",
        "99999999999999999999",
        "1e400",
        "0.5",
        "nan",
        "inf",
        "None",
        "True",
        "''",
        '"x"',
        "()",
        "[]",
        "(1,)",
        "{}",
        "...",
    ),
    *(
        "*x",
        "**x",
        "x.y",
        "x()",
        "lambda: 0",
        "lambda i0: i0",
        "f'{x}'",
        "b'a'",
        "1j",
        "(y := 1)",
        "-x",
        "not x",
        "x if x else x",
        "[*x]",
    ),
    *(
        "f32",
        "f32[1]",
        "u8[0]",
        "c64[2]",
        "f32[S]",
        "q8",
        "i0",
        "a0",
        "r0",
        "acc0",
        "block",
        "lane",
        "warp",
        "x",
        "z",
        "S",
        "size(1, 2)",
    ),
    *(
        "at(x[0], 3)",
        "sum",
        "add",
        "index",
        "get",
        "size",
        "if",
        "for",
        "with",
        "in",
        "return",
        "pass",
        "and",
        ">=",
        "<-",
        "@",
        ":",
        ",",
        "=",
    ),
    *(
        "(",
        ")",
        "[",
        "]",
        "\t",
        "\f",
        "\\",
        "\0",
        "é",
        "²",
        "#",
        '"',
        "'",
        "+",
        "//",
        "%",
        "* 1000000007",
        "// 0",
        "% -1",
    ),
)
"""What is put between: numbers and names at the edges, and Python that no IR has."""


@cache
def corpus() -> tuple[str, ...]:
    """Every stage of some programs, as text; schedules by themselves too."""
    out: dict[str, None] = {}
    for name, target in SUBJECTS:
        torch.manual_seed(0)
        found = lowering(capture(CASES[name].fn, SMALL[name](), {}).program, Options(target=target))
        out |= dict.fromkeys(show(found.at(ir)) for ir in IRS)
        out |= dict.fromkeys(str(s) + "\n" for _, s in found.at("tile").schedules)
    return tuple(sorted(out, key=len))


@st.composite
def texts(draw: Any) -> str:
    """A text of the corpus with up to four things changed."""
    text: str = draw(st.sampled_from(corpus()))
    for _ in range(draw(st.sampled_from((1, 1, 2, 3, 4)))):  # of one change alone most is left to read
        edit = draw(st.sampled_from((_word, _word, _word, _line, _character)))
        text = edit(draw, text)
    return text


def _word(draw: Any, text: str) -> str:
    """One word replaced, dropped or doubled."""
    words = re.findall(r"\w+|\s+|[^\w\s]", text) or [""]
    at = draw(st.integers(0, len(words) - 1))
    other = draw(st.integers(0, len(words) - 1))
    new = {"new": draw(st.sampled_from(WORDS)), "other": words[other], "drop": "", "twice": words[at] * 2}
    words[at] = new[draw(st.sampled_from(("new", "new", "other", "drop", "twice")))]
    return "".join(words)


def _line(draw: Any, text: str) -> str:
    """One line dropped, doubled, moved or indented."""
    lines = text.split("\n")
    at, to = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    match draw(st.sampled_from(("drop", "twice", "move", "in", "out", "end"))):
        case "drop":
            del lines[at]
        case "twice":
            lines.insert(to, lines[at])
        case "move":
            lines.insert(to, lines.pop(at))
        case "in":
            lines[at] = "    " + lines[at]
        case "out":
            lines[at] = lines[at].removeprefix("    ")
        case "end":
            lines = lines[:at]
    return "\n".join(lines)


def _character(draw: Any, text: str) -> str:
    """A few characters replaced by any."""
    at = draw(st.integers(0, len(text)))
    length = draw(st.integers(0, 3))
    return text[:at] + draw(st.text(max_size=2)) + text[at + length :]
