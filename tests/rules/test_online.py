"""A softmax between two products becomes part of the second one, unless that reads what is made of it otherwise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import pytest

from terrazzo.errors import CompilerBug
from terrazzo.hw.gpu import GPUS
from terrazzo.ir.dialects.loop import Kernel
from terrazzo.ir.text import parse
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.attention.online import online
from terrazzo.rules.loop.definitions import in_order
from terrazzo.rules.loop_to_tile.chains.chains import refusal
from terrazzo.rules.loop_to_tile.estimate import expected

BESIDE = """@loop
def f(x: bf16[128, 64], y: bf16[128, 64], v: bf16[128, 64]):
    with kernel('scores', scores=bf16[128, 128]):
        for a0 in free(128):
            for a1 in free(128):
                for r0 in reduce(64):
                    in0 = x[a0, r0]
                    v0 = f32(in0)
                    in1 = y[a1, r0]
                    v1 = f32(in1)
                    v2 = mul(v0, v1)
                    acc0 <- sum(v2)
                v3 = bf16(acc0)
                scores[a0, a1] = v3
    with kernel('weights', top=f32[128], weights=bf16[128, 128]):
        for a0 in free(128):
            for r0 in reduce(128):
                in0 = scores[a0, r0]
                v0 = f32(in0)
                acc0 <- max(v0)
            top[a0] = acc0
            for r0 in reduce(128):
                in1 = scores[a0, r0]
                v1 = f32(in1)
                v2 = sub(v1, acc0)
                v3 = exp(v2)
                acc1 <- sum(v3)
            for a1 in free(128):
                in2 = scores[a0, a1]
                v4 = f32(in2)
                v5 = sub(v4, acc0)
                v6 = exp(v5)
                v7 = div(v6, acc1)
                v8 = bf16(v7)
                weights[a0, a1] = v8
    with kernel('values', values=bf16[128, 64]):
        for a0 in free(128):
            for a1 in free(64):
                in0 = v[a0, a1]
                v0 = f32(in0)
                in1 = top[a0]
                v1 = mul(v0, in1)
                v2 = bf16(v1)
                values[a0, a1] = v2
    with kernel('out', out=bf16[128, 64]):
        for a0 in free(128):
            for a1 in free(64):
                for r0 in reduce(128):
                    in0 = weights[a0, r0]
                    v0 = f32(in0)
                    in1 = values[r0, a1]
                    v1 = f32(in1)
                    v2 = mul(v0, v1)
                    acc0 <- sum(v2)
                v3 = bf16(acc0)
                out[a0, a1] = v3
    return (out, top)
"""
"""Weights whose values are made of the weights' highest scores, which their kernel stores besides."""


def test_kernels_are_not_joined_around_one_that_reads_the_first_for_the_second() -> None:
    log = Log()
    done = online(parse(BESIDE), log, lambda kernel: "")
    assert [s.name for s in done.steps] == ["scores", "weights", "values", "out"]
    assert [e.reason for e in log.events] == ["it reads what is made of other results of weights"]


def test_kernels_that_store_more_of_a_row_are_joined_where_nobody_makes_something_of_that_for_them() -> None:
    apart = parse(BESIDE.replace("values[r0, a1]", "v[r0, a1]"))
    log = Log()
    assert [s.name for s in online(apart, log, lambda kernel: "").steps] == ["out", "values"]
    assert [e.fired for e in log.events] == [True]


COSINES = """
                    v1 = index(r0)
                    v4 = f32(v1)
                    v5 = index(a1)
                    v6 = f32(v5)
                    v7 = mul(v4, v6)
                    v8 = cos(v7)
                    v9 = bf16(v8)
                    v10 = f32(v9)
                    v2 = mul(v0, v10)"""


def test_values_that_are_functions_of_places_are_stored_first() -> None:
    read = re.compile(r"\n +in1 = values.*\n.*\n.*mul\(v0, v1\)")
    assert len(read.findall(BESIDE)) == 1
    done = online(parse(read.sub(COSINES, BESIDE)), Log(), lambda kernel: "")
    assert [s.name for s in done.steps] == ["out_places", "out", "values"]
    linear = parse(read.sub(COSINES, BESIDE).replace("exp(", "abs("))  # and for a softmax only
    assert [s.name for s in online(linear, Log(), lambda kernel: "").steps] == [s.name for s in linear.steps]


def test_steps_that_read_each_other_have_no_order() -> None:
    program = parse(BESIDE)
    scores, weights, values, out = program.steps
    around = online(parse(BESIDE.replace("values[r0, a1]", "v[r0, a1]")), Log(), lambda kernel: "").steps[0]
    reads = type(out)("out", out.axes, (*around.stores[:1], *out.stores), "")  # it stores top, which values reads
    with pytest.raises(CompilerBug, match="out reads what is made of its own results"):
        in_order(program, [scores, weights, reads, values])


FILTERS = """@loop
def f(x: bf16[8192, 512], w: bf16[9, 512], v: bf16[8200, 64]):
    with kernel('scores', scores=bf16[8192, 9]):
        for a0 in free(8192):
            for a1 in free(9):
                for r0 in reduce(512):
                    in0 = x[a0, r0]
                    v0 = f32(in0)
                    in1 = w[a1, r0]
                    v1 = f32(in1)
                    v2 = mul(v0, v1)
                    acc0 <- sum(v2)
                v3 = bf16(acc0)
                scores[a0, a1] = v3
    with kernel('weights', weights=bf16[8192, 9]):
        for a0 in free(8192):
            for r0 in reduce(9):
                in0 = scores[a0, r0]
                v0 = f32(in0)
                acc0 <- max(v0)
            for r0 in reduce(9):
                in1 = scores[a0, r0]
                v1 = f32(in1)
                v2 = sub(v1, acc0)
                v3 = exp(v2)
                acc1 <- sum(v3)
            for a1 in free(9):
                in2 = scores[a0, a1]
                v4 = f32(in2)
                v5 = sub(v4, acc0)
                v6 = exp(v5)
                v7 = div(v6, acc1)
                v8 = bf16(v7)
                weights[a0, a1] = v8
    with kernel('out', out=bf16[8192, 64]):
        for a0 in free(8192):
            for a1 in free(64):
                for r0 in reduce(9):
                    in0 = weights[a0, r0]
                    v0 = f32(in0)
                    in1 = v[a0 + r0, a1]
                    v1 = f32(in1)
                    v2 = mul(v0, v1)
                    acc0 <- sum(v2)
                v3 = bf16(acc0)
                out[a0, a1] = v3
    return (out,)
"""
"""Nine positions beside each other, in each place with weights of its own."""


def test_few_scores_are_stored_where_one_kernel_takes_longer() -> None:
    """A tile has sixteen rows, of which one is wanted."""
    log, gpu = Log(), GPUS["sm_90a"]
    asked = partial(online, parse(FILTERS), log, partial(refusal, gpu=gpu, lost=lambda kernel: ""))
    assert len(asked().steps) == 1  # a chain can be built of it
    assert [s.name for s in asked(price=partial(expected, gpu=gpu)).steps] == ["scores", "weights", "out"]
    assert re.fullmatch(r"[\d.]+ us as one kernel, [\d.]+ us apart", log.events[-1].reason)


def test_what_many_scores_take_is_not_asked() -> None:
    def price(steps: Sequence[Kernel]) -> float:
        raise AssertionError

    text = FILTERS.replace("(9)", "(65)").replace("[9,", "[65,").replace(", 9]", ", 65]").replace("8200", "8256")
    assert len(online(parse(text), Log(), lambda kernel: "", price=price).steps) == 1
