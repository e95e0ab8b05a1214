"""A transport is one record: what plans may ask of it, and how it is written, is in its class."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from tests.kernels.arrangements import Product
from tests.kernels.test_arrangements import right

from terrazzo.errors import UserError
from terrazzo.hw.gpu import gpu
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.text import parse
from terrazzo.rules import tile, tile_to_kernel
from terrazzo.rules.tile.complete import _completed
from terrazzo.rules.tile_to_kernel.lower import lower
from terrazzo.rules.transports import TRANSPORTS, Copied


class OneByOne(Copied):
    """cp.async whose groups are all waited for in every step."""

    name = "patient"
    since = 86

    def wait(self, t: IntExpr) -> None:
        self.builder.add(k.WaitGroups(0))
        self.writer.fence()


def text(by: str, target: str = "sm_86") -> str:
    warps = {"on": "mma", "tile": (32, 16, 32), "shape": (40, 24, 160), "swizzle": 64, "warps": (1, 1)}
    return Product(**warps, by=by, target=target, ring=3).text  # type: ignore[arg-type]


def test_another_transport_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules name it, rules and checks of plans ask it, and the pipeline writes its acts."""
    with pytest.raises(UserError, match=r"x is brought in by 'patient'; known: ld, cp\.async, tma"):
        right(text("patient"))
    monkeypatch.setitem(TRANSPORTS, OneByOne.name, OneByOne)
    _completed.cache_clear()
    right(text("patient"))
    with pytest.raises(UserError, match="x is brought in by patient, which needs sm_86, and the target is sm_80"):
        right(text("patient", "sm_80"))
    program = parse(text("patient"))
    kernel = lower(program.loop.steps[0], program.schedules[0][1], gpu("sm_86"))  # type: ignore[arg-type]
    assert {s.open for s in k.walk(kernel.body) if isinstance(s, k.WaitGroups)} == {0}


def test_no_other_file_knows_a_transport_by_name() -> None:
    """But for results, which leave by `ld` or TMA, and the fragments of an instruction, which come by `ld` or
    ldmatrix.
    """
    folders = [Path(inspect.getfile(x)).parent for x in (tile, tile_to_kernel)]
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    found = {
        file.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in TRANSPORTS
    }
    assert len(files) > 20
    assert found == {"checks.py", "gather.py", "layouts.py", "lower.py", "products.py", "results.py"}
