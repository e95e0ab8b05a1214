"""What statements of Kernel IR say of themselves, from which their text, their checks and their mutants follow."""

from __future__ import annotations

import pytest

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.node import OPS

STATEMENTS = [x for x in OPS["kernel"].values() if issubclass(x, k.Statement)]
every = pytest.mark.parametrize("kind", STATEMENTS, ids=lambda x: x.op)


@every
def test_every_field_is_written_once(kind: type[k.Statement]) -> None:
    assert sorted(f for x in kind.arguments() for f in x.fields) == sorted(kind._fields)
    assert kind.__doc__


@every
def test_what_it_writes_are_places_that_it_names(kind: type[k.Statement]) -> None:
    places = {x.fields[0] for x in kind.arguments() if x.kind in k.PLACES or x.kind == "source"}
    assert {*kind.writes} <= places
    assert kind.writes or not places


@every
def test_who_comes_to_it_is_known(kind: type[k.Statement]) -> None:
    assert kind is k.Sync or kind.together in ("", "lane", "warp", "warpgroup", "block", "cluster")


def test_what_a_product_says_of_itself() -> None:
    assert ", ".join(map(str, k.MultiplyAsync.arguments())) == (
        "word, registers, place, shared, transposed=word, fresh=condition"
    )
    assert ", ".join(map(str, k.AsyncCopy.arguments())) == "shared, source, number"
    assert (k.Sync().together, k.Sync(1, 4).together) == ("block", "warp")
