"""A little of `make fuzz KIND=hostile`; and that it would find what it looks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz import run
from tests.fuzz.hostile import CALLS, Crashed, Victim, library

pytestmark = pytest.mark.skipif(not library(), reason="needs a C++ compiler with the address sanitizer")

LOOP = """@loop
def f(x: f32[64]):
    with kernel("t", t=f32[64]):
        for a0 in free(64):
            t[a0] = neg(x[a0])
    with kernel("s", s=f32[64]):
        for a0 in free(64):
            s[a0] = exp(t[a0])
    with kernel("y", y=f32[64]):
        for a0 in free(64):
            y[a0] = add(s[a0], t[63 - a0])
    return (y,)
"""
FILE = """@torch
def f(x: f32[64]):
    y: f32[40] = aten.from_file.default('CANARY', True, 40)
    return (y,)
"""


@pytest.fixture(scope="module")
def trusting() -> Iterator[Victim]:
    """A process without the verifier."""
    found = Victim(trusting=True)
    yield found
    found.close()


def run_words(ir: str) -> list[list[str]]:
    return [["run", "--no-fuse", "--allow-fallback", "--from", ir, "FILE"]]


def test_nothing_is_found() -> None:
    outcomes, found = run.fuzz("hostile", 15, seed=0)
    assert not found, "\n".join(found)
    assert outcomes.total() >= 12 and any("ran" in what for what in outcomes)
    assert sum(n for what, n in outcomes.items() if "refused" in what) >= 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("y[a0] =", "y[a0 + 1] ="),
        ("s[a0] =", "s[a0 + 1] ="),
        ("neg(x[a0])", "neg(x[a0 - 1] if 100 - a0 >= 0 else 0)"),
    ],
)
def test_the_sanitizer_finds_what_the_verifier_refuses(trusting: Victim, before: str, after: str) -> None:
    """In inputs, in results and between temporaries; and the text is refused, with its place, where it is looked at."""
    assert before in LOOP
    with pytest.raises(Crashed, match=r"heap-buffer-overflow|use-after-poison|SEGV|unknown-crash"):
        trusting.run(LOOP.replace(before, after), run_words("loop"))


def test_a_file_that_is_touched_is_found(trusting: Victim) -> None:
    with pytest.raises(Crashed, match="a file was touched"):
        trusting.run(FILE, run_words("torch"))
    assert any("from_file" in call for call in CALLS)
