"""The operators' page: what is run anew takes the place of what the page said, the rest stays."""

from __future__ import annotations

from typing import Any

from tests.opinfo.run import table


def verdict(level: str, op: str, dtype: str, said: str, reason: str = "") -> dict[str, Any]:
    return {"level": level, "op": op, "dtype": dtype, "verdict": said, "samples": 3, "reason": reason, "fallbacks": []}


OLD = [
    verdict("loop", "add", "float32", "own"),
    verdict("loop", "add", "int64", "own"),
    verdict("loop", "sort", "float32", "fallback", "aten.sort | stable"),
]


def test_other_levels_stay() -> None:
    page = table([verdict("cuda", "add", "float32", "own")], table(OLD))
    assert "| the Loop IR interpreter | 9 | 1 of 2 | 2 | 1 | 0 | 0 | 0 |" in page
    assert "| an H200 | 3 | 1 of 1 | 1 | 0 | 0 | 0 | 0 |" in page
    assert "| add | float32 | own |  | own |  |" in page and "| add | int64 | own |  |  |  |" in page
    assert "| sort | float32 | fallback |  |  | aten.sort / stable |" in page


def test_a_page_read_back_is_the_same() -> None:
    page = table([*OLD, verdict("cuda", "sort", "float32", "skipped", "no memory")])
    assert table([], page) == page


def test_what_is_run_again_counts_as_now() -> None:
    page = table([verdict("loop", "add", "float32", "wrong", "off")], table(OLD))
    assert "| add | float32 | wrong |  |  | off |" in page and "| sort |" in page
