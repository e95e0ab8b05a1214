"""Symbolic dimensions print, read back, verify, lift and fuse; only running needs their values."""

from __future__ import annotations

import pytest
from tests.harness import assert_round_trip

from terrazzo.errors import UserError
from terrazzo.interp import tensor as interp
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.expr import Size, bounds
from terrazzo.ir.program import Input, Program
from terrazzo.ir.types import Type, f32
from terrazzo.ir.verify import verify
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.loop.fusion.fuse import fuse
from terrazzo.rules.tensor_to_loop.lift import lift

S = Size("S", 1, 4096)


def softmax_of_matmul() -> Program:
    x, w = Input("x", Type(f32, (S, 64))), Input("w", Type(f32, (S, 64)))
    i = t.coordinates((S, S, 64))
    scores = t.reduce(
        "sum", t.apply("mul", t.index_map(x, (S, S, 64), (i[0], i[2])), t.index_map(w, (S, S, 64), (i[1], i[2]))), [2]
    )
    top = t.broadcast(t.reduce("max", scores, [1], keepdim=True), (S, S))
    weights = t.apply("exp", t.apply("sub", scores, top))
    heads = t.reshape(t.permute(t.reshape(x, (S, 4, 16)), (1, 0, 2)), (4 * S, 16))
    return Program("tensor", "f", (x, w), (weights, heads))


def test_text_verifier_lifting_and_fusion() -> None:
    program = softmax_of_matmul()
    assert_round_trip(program)
    verify(program)
    lifted = lift(program)
    assert_round_trip(lifted)
    verify(lifted)
    fused = fuse(lifted, Log(), Rates())
    assert_round_trip(fused)
    verify(fused)
    assert len(fused.steps) < len(lifted.steps)


def test_views_of_symbolic_shapes_fold() -> None:
    x = Input("x", Type(f32, (S, 64)))
    assert t.reshape(t.reshape(x, (S, 4, 16)), (S, 64)) is x
    assert t.reshape(t.reshape(x, (S * 64,)), (S, 64)) is x


def test_ranges() -> None:
    assert bounds(S) == (1, 4096)
    assert bounds(S * 2 + 3) == (5, 8195)
    assert bounds(S // 2) == (0, 2048)


def test_running_needs_a_size() -> None:
    with pytest.raises(UserError, match="dimension S of"):
        interp.run(softmax_of_matmul(), {"x": [[0.0] * 64], "w": [[0.0] * 64]})
