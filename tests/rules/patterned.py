"""Random programs with the patterns that rewrites look for, which random programs seldom have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.rules.catalog import CATALOG

from terrazzo.errors import UserError
from terrazzo.ir.dialects import loop
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.node import substitute, transform
from terrazzo.ir.program import Input, Program
from terrazzo.ir.types import Type, bf16, f32, i64
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.attention.online import online
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.loop.fusion.fuse import fuse
from terrazzo.rules.loop.fusion.inline import inline
from terrazzo.rules.loop_to_tile.walked.collapse import flat_reductions
from terrazzo.rules.tensor_to_loop.lift import lift


def seasoned(program: Program) -> Program:
    """A random program with what random programs seldom have: patterns that only few rules look for."""
    some = [r for r in (*program.results[::-1], *program.inputs) if r.type.dtype is f32]  # type: ignore[attr-defined]
    x = some[0] if some else t.cast(program.inputs[0], f32)
    row = t.reshape(x, (x.type.numel,))  # type: ignore[attr-defined]
    n = row.type.shape[0]
    positive = t.apply("add", t.apply("abs", row), t.literal(1.0, f32, (n,)))
    quotient = t.cast(t.apply("div", row, positive), bf16)  # rounded at once
    narrow = t.apply(
        "neg", t.cast(t.broadcast(t.cast(t.apply("exp", row), bf16), (2, n)), f32)
    )  # rounded by every reader
    deep = t.apply("tanh", t.broadcast(row, (2, 3, n)))
    moved = t.apply("add", t.apply("mul", row, t.literal(1.75, f32, (n,))), row)
    heads = t.apply("floor", t.broadcast(moved, (2, 3, n)))  # which needs a rounded product
    weights = t.apply("exp", t.apply("sub", moved, positive))  # of scores, less what they are compared with
    merged = t.reduce("sum", t.reshape(t.permute(heads, (1, 0, 2)), (3, 2 * n)), [1])  # read as one dimension
    largest = t.reduce("max", deep, [0, 2])
    where = t.reduce("argmax", (row, t.iota((n,), t.coordinates((n,))[0])), [0])[1], t.reduce("max", row, [0])
    i = t.coordinates((2, 3, 5, n))
    factors = t.index_map(deep, (2, 3, 5, n), (i[0], i[1], i[3])), t.index_map(narrow, (2, 3, 5, n), (i[2] % 2, i[3]))
    batched = t.reduce("sum", t.apply("mul", *factors), [3])  # a product with two axes of rows
    columns = t.LaidOut(t.broadcast(t.apply("sin", row), (2, n)), (1, 2))
    numbers = t.iota((n, 2), t.coordinates((n, 2))[0])
    image = t.cast(t.scan("sum", t.cast(t.iota((2, 9, 3), t.coordinates((2, 9, 3))[1]), f32), 0), bf16)
    i = t.coordinates((2, 4, 3, 9))
    taken = t.index_map(image, (2, 4, 3, 9), (i[0], i[3], i[2])), t.index_map(image, (2, 4, 3, 9), (0, i[3], i[1] % 3))
    channels = t.reduce("sum", t.apply("mul", *(t.cast(x, f32) for x in taken)), [3])  # a sum along what lies apart
    weighted = attention(t.cast(row, bf16), n)
    table = t.scan("sum", t.cast(t.iota((4, 9), t.coordinates((4, 9))[1]), f32), 0)
    i = t.coordinates((4, 3, 9))
    taken = t.index_map(table, (4, 3, 9), (i[0], i[2])), t.index_map(table, (4, 3, 9), (i[1] + 1, i[2]))
    rows = t.reduce("sum", t.apply("mul", *taken), [2])  # a product of rows that begin at no multiples of 16 bytes
    j = t.coordinates((2, 4, 9))
    taken = t.index_map(table, (2, 4, 9), (j[1] // 2, j[2])), t.index_map(table, (2, 4, 9), (j[0] * 2 + j[1] % 2, j[2]))
    shuffled = t.reduce("sum", t.apply("mul", *taken), [2])  # each factor knows another digit of the columns
    more = (quotient, weights, narrow, merged, largest, batched, weighted, columns, numbers, channels, rows, shuffled)
    other = t.index_map(table, (4, 3, 9), (i[0], i[2])), t.index_map(table, (4, 3, 9), (3 - i[1], i[2]))
    both = t.apply("mul", t.apply("tanh", rows), t.reduce("sum", t.apply("mul", *other), [2]))  # of two products
    i = t.coordinates((6, 3, 9))
    place = t.loaded(t.cast(t.index_map(table, (6,), (i[0] % 4, 0)), i64), (i[0],), 4)  # all are the first
    found = t.index_map(table, (6, 3, 9), (place, i[2])), t.index_map(table, (6, 3, 9), (i[1], i[2]))
    looked_up = t.reduce("sum", t.apply("mul", *found), [2])  # a product of rows that data says where to find
    more = (
        *more,
        both,
        looked_up,
        two_in_one(table),
        across(*(t.scan("sum", t.cast(t.iota(s, t.coordinates(s)[1]), f32), 0) for s in ((4, 16), (2, 6, 8)))),
        spread(*(t.scan("sum", t.cast(t.iota(s, t.coordinates(s)[1]), f32), 0) for s in ((3, 16), (5, 4, 16)))),
        t.literal(2.0, f32, (3,)),
        *where,
        few_of_rows(t.scan("sum", t.cast(t.iota((6, 400), sum(t.coordinates((6, 400))) % 3), f32), 1)),
        *moments(t.scan("sum", t.cast(t.iota((7, 8), t.coordinates((7, 8))[1]), f32), 0)),
        late(wide := t.scan("sum", t.cast(t.iota((60, 8), t.coordinates((60, 8))[1]), f32), 0)),
        *rounded(wide),
        summed(wide),
    )
    return Program("tensor", program.name, program.inputs, (*program.results, *more))


def with_rows(program: Program) -> Program:
    """A program with many rows of what it gives, which are stored and then read."""
    more = []
    for x in (x for x in program.results if x.type.dtype.kind == "float"):
        rows = t.apply("exp", t.broadcast(t.reshape(x, (1, x.type.numel)), (512, x.type.numel)))
        more.append(t.reduce("max", rows, [1]))
    return Program("tensor", program.name, program.inputs, (*program.results, *more))


def with_bias(program: Program) -> loop.Program:
    """A program with products of many matrices, and what a table adds to all of them by row and column."""
    x, y = (t.scan("sum", t.cast(t.iota(s, t.coordinates(s)[2]), f32), 0) for s in ((40, 3, 9), (40, 4, 9)))
    i, j = t.coordinates((40, 3, 4, 9)), t.coordinates((40, 3, 4))
    factors = t.index_map(x, (40, 3, 4, 9), (i[0], i[1], i[3])), t.index_map(y, (40, 3, 4, 9), (i[0], i[2], i[3]))
    near = t.scan("sum", t.iota((3, 4), t.coordinates((3, 4))[1]), 0)
    table = t.scan("sum", t.cast(t.iota((12,), t.coordinates((12,))[0]), f32), 0)
    bias = t.index_map(table, (40, 3, 4), (t.loaded(near, (j[1], j[2]), 12),))
    biased = t.apply("add", t.reduce("sum", t.apply("mul", *factors), [3]), bias)
    whole = Program("tensor", program.name, program.inputs, (*program.results, biased))
    return fuse(lift(whole), Log(), Rates())


def with_windows(program: Program) -> loop.Program:
    """A program with sums over windows of one axis and maxima over windows of two, which reach beyond the image."""
    n = sum(x.type.numel for x in program.inputs)
    long, stride = 5 + n % 3, 1 + n % 2
    image = Input("image", Type(f32, (4, 9, 11)))
    i = t.coordinates((4, 9, 5, long))
    sums = t.reduce("sum", t.index_map(image, (4, 9, 5, long), (i[0], i[1], i[2] * stride // 2 + i[3])), [3])
    i = t.coordinates((4, 5, 11, 3, 3))
    place = i[1] * stride + i[3] - 1, i[2] + i[4] - 1
    inside = (place[0], 8 - place[0], place[1], 10 - place[1])
    largest = t.reduce("max", t.index_map(image, (4, 5, 11, 3, 3), (i[0], *place), inside), [3, 4])
    i = t.coordinates((4, 9, 5, long))
    along = t.reduce("sum", t.index_map(image, (4, 9, 5, long), (i[0], i[1], i[2] + i[3])), [3])
    results = (*program.results, sums, largest, along)
    return fuse(lift(Program("tensor", "windows", (*program.inputs, image), results)), Log(), Rates())


def two_in_one(x: Any) -> Any:
    """A product with whole numbers each of which holds two elements of a factor."""
    shape = (3, 5, 8)
    i = t.coordinates(shape)
    numbers = t.scan("sum", t.iota((5, 4), t.coordinates((5, 4))[1]), 0)
    held = t.index_map(numbers, shape, (i[1], i[2] // 2))
    digit = t.apply("and_", t.apply("shr", held, t.iota(shape, i[2] % 2)), t.literal(1, i64, shape))
    factors = t.index_map(x, shape, (i[0], i[2])), t.cast(t.cast(digit, bf16), f32)
    return t.reduce("sum", t.apply("mul", *factors), [2])


def spread(image: Any, filters: Any) -> Any:
    """A transposed convolution with a stride of 2."""
    i = t.coordinates((5, 6, 16, 4))
    reached = i[1] - i[3] + 5
    place = reached // 2 - 2
    inside = (place, 2 - place, reached % 2 * -1)
    factors = (
        t.index_map(image, (5, 6, 16, 4), (place, i[2]), inside),
        t.index_map(filters, (5, 6, 16, 4), (i[0], i[3], i[2])),
    )
    return t.reduce("sum", t.apply("mul", *factors), [2, 3])


def across(x: Any, w: Any) -> Any:
    """A product over the first axis of a factor and its last, where eight lie beside each other."""
    i = t.coordinates((4, 6, 16))
    factors = t.index_map(x, (4, 6, 16), (i[0], i[2])), t.index_map(w, (4, 6, 16), (i[2] % 2, i[1], i[2] // 2))
    return t.reduce("sum", t.apply("mul", *factors), [2])


def late(x: Any) -> Any:
    """What is made early and needed once more after much else was in memory."""
    early = t.apply("sin", x)
    much = t.apply("tanh", t.broadcast(t.reduce("sum", early, [1], keepdim=True), (60, 800)))
    largest = t.reduce("max", much, [1], keepdim=True)
    return t.apply("mul", t.apply("mul", early, t.broadcast(largest, (60, 8))), x)


def summed(x: Any) -> Any:
    """What is made one after the other, and then summed."""
    steps = [t.broadcast(x, (100, 60, 8))]
    for _ in range(4):
        steps.append(t.scan("max", t.apply("neg", steps[-1]), len(steps) % 2))
    whole = steps[1]
    for y in steps[2:]:
        whole = t.apply("add", whole, y)
    return t.reduce("max", whole, [0])


def rounded(x: Any) -> tuple[Any, Any, Any]:
    """What is rounded to 16 bits, and kept in 32 for two who need it, since it takes long to make."""
    shape = (200, 60, 8)
    angle = t.apply("mul", t.cast(t.iota(shape, t.coordinates(shape)[0]), f32), t.broadcast(x, shape))
    narrow = t.cast(t.cast(t.reduce("sum", t.apply("sin", angle), [0]), bf16), f32)
    row = t.scan("sum", t.cast(t.iota((8,), t.coordinates((8,))[0]), f32), 0)
    wide = t.apply("sub", narrow, t.broadcast(row, (60, 8)))
    return t.apply("tanh", wide), t.reduce("max", t.apply("exp", wide), [0]), t.reduce("max", wide, [1])


def moments(x: Any) -> tuple[Any, Any]:
    """The sum of squared distances from the mean of every row; and other rows, below their largest element."""
    mean = t.apply("div", t.reduce("sum", x, [1], keepdim=True), t.literal(8.0, f32, (7, 1)))
    far = t.apply("sub", x, t.broadcast(mean, (7, 8)))
    y = t.index_map(x, (3, 7), t.coordinates((3, 7)))
    below = t.apply("sub", y, t.broadcast(t.reduce("max", y, [1], keepdim=True), (3, 7)))
    return t.reduce("sum", t.apply("mul", far, far), [1]), t.apply("exp", below)


def few_of_rows(x: Any) -> Any:
    """The largest of some elements, with the other sign, across rows that were divided by their sums."""
    e = t.apply("exp", x)
    shares = t.apply("div", e, t.broadcast(t.reduce("sum", e, [1], keepdim=True), (6, 400)))
    i = t.coordinates((6, 40))
    return t.reduce("max", t.apply("neg", t.index_map(shares, (6, 40), (i[0], i[1] * 10 + i[0]))), [0])


def attention(x: Any, n: int) -> Any:
    """Four rows of scores, weights and values, made of one row; two of them have keys in common."""
    i = t.coordinates((4, 5, 4))
    q, k = (t.cast(t.index_map(x, (4, 5, 4), (e % n,)), f32) for e in (i[0] + i[2], i[0] // 2 + i[1] + i[2]))
    scores = t.reduce("sum", t.apply("mul", q, k), [2])
    above = t.apply("sub", scores, t.broadcast(t.reduce("max", scores, [1], keepdim=True), (4, 5)))
    e = t.apply("exp", above)
    weights = t.apply("div", e, t.broadcast(t.reduce("sum", e, [1], keepdim=True), (4, 5)))
    c = t.coordinates((4, 3, 5))
    values = t.cast(t.index_map(x, (4, 3, 5), ((c[0] // 2 + c[1] + 2 * c[2]) % n,)), f32)
    return t.cast(
        t.reduce("sum", t.apply("mul", t.index_map(weights, (4, 3, 5), (c[0], c[2])), values), [2]), x.type.dtype
    )


def with_a_state(program: Program) -> loop.Program:
    """A kernel that gives an input new values, of a row, of some columns, or of both, and one that reads the old."""
    state = Input("state", Type(f32, (4, 6)))
    i, j = t.coordinates((4, 6))
    n = sum(x.type.numel for x in program.inputs)
    row, column = (t.iota((4, 6), e) for e in (i, j))
    here = t.apply("eq", row, t.literal(n % 4, i64, (4, 6)))
    there = t.apply("lt", column, t.literal(1 + n % 5, i64, (4, 6)))
    chosen = (here, there, t.apply("and_", here, there))[n % 3]
    new = t.where(chosen, t.apply("neg", state), state)
    total = t.reduce("sum", state, [0])
    return fuse(lift(Program("tensor", "renewed", (*program.inputs, state), (total, new))), Log(), Rates())


def with_states(program: Program) -> Any:
    """Loop IR of states that are made one after the other, of each of which one kernel stores the sums of rows."""
    given = [x for x in program.inputs if x.type.numel]
    first = [t.cast(t.index_map(x, (60, 8), tuple(0 for _ in x.type.shape)), f32) for x in given[:1]]
    states: list[Any] = first or [t.literal(1.0, f32, (60, 8))]
    for _ in range(4):
        states.append(t.scan("max", t.apply("neg", states[-1]), len(states) % 2))
    sums = tuple(t.reduce("sum", y, [1]) for y in states[1:])
    found = lift(Program("tensor", "states", program.inputs, sums))
    last = [s for s in found.steps if not {*s.writes}.isdisjoint(found.results)]
    axes = last[0].axes
    stores = [substitute(s.stores[0], dict(zip(s.axes, axes, strict=True))) for s in last]
    whole = loop.Kernel(last[-1].name, axes, tuple(stores))
    return loop.Program(found.name, found.inputs, (*(s for s in found.steps if s not in last), whole), found.results)


def with_both(program: Program) -> Any:
    """Loop IR of a kernel that stores sums of rows and what it makes of them, of which another one reads."""
    given = [x for x in program.inputs if x.type.numel]
    i = t.coordinates((6, 8, 9))
    first = [t.cast(t.index_map(x, (6, 8, 9), tuple(sum(i) % n for n in x.type.shape)), f32) for x in given[:1]]
    total = t.reduce("sum", t.apply("tanh", *first) if first else t.literal(0.5, f32, (6, 8, 9)), [2])
    most = t.reduce("max", t.apply("neg", total), [1])
    found = lift(Program("tensor", "both", program.inputs, (total, most)))
    *before, made, other, reader = found.steps
    then = inline(other, made)  # type: ignore[arg-type]
    stores = (*made.stores, substitute(then.stores[0], dict(zip(then.axes, made.axes, strict=True))))  # type: ignore[union-attr]
    both = loop.Kernel("both", made.axes, stores)  # type: ignore[union-attr]
    return loop.Program(found.name, found.inputs, (*before, both, reader), found.results)


def with_places(program: Program) -> Any:
    """Loop IR of a kernel for each row of something, all alike."""
    given = [x for x in program.inputs if x.type.numel]
    first = [t.cast(t.index_map(x, (3, 64), tuple(0 for _ in x.type.shape)), f32) for x in given[:1]]
    rows: Any = t.scan("max", *first, 1) if first else t.literal(1.0, f32, (3, 64))
    each = [t.apply("neg", t.index_map(rows, (64,), (k, t.coordinates((64,))[0]))) for k in range(3)]
    return CATALOG["fuse:view"].apply(lift(Program("tensor", "places", program.inputs, tuple(each))))


def with_shares(program: Program) -> Any:
    """Loop IR of sums of rows below their largest elements, and of who reads both, which are in every kernel."""
    given = [x for x in program.inputs if x.type.numel]
    i = t.coordinates((3, 64))
    first = [t.cast(t.index_map(x, (3, 64), tuple((i[0] + i[1]) % n for n in x.type.shape)), f32) for x in given[:1]]
    rows: Any = t.apply("tanh", *first) if first else t.literal(1.0, f32, (3, 64))
    below = t.apply("sub", rows, t.broadcast(t.reduce("max", rows, [1], keepdim=True), (3, 64)))
    total = t.reduce("sum", t.apply("exp", below), [1])
    shares = t.apply("div", t.apply("exp", below), t.index_map(total, (3, 64), (i[0],)))
    return _in_one(lift(Program("tensor", "shares", program.inputs, (total, shares))))


def with_products(program: Program) -> Any:
    """Loop IR of a product of a product, in one kernel."""
    given = [x for x in program.inputs if x.type.numel]
    i, j, h = t.coordinates((6, 5, 8)), t.coordinates((6, 4, 5)), t.coordinates((6, 8))
    first = [t.cast(t.index_map(x, (6, 8), tuple((h[0] + h[1]) % n for n in x.type.shape)), f32) for x in given[:1]]
    x: Any = t.apply("tanh", *first) if first else t.literal(0.5, f32, (6, 8))
    y = t.apply("mul", t.index_map(x, (6, 5, 8), (i[0], i[2])), t.index_map(x, (6, 5, 8), (i[1], i[2])))
    scores = t.apply("neg", t.reduce("sum", y, [2]))
    z = t.apply("mul", t.index_map(scores, (6, 4, 5), (j[0], j[2])), t.index_map(x, (6, 4, 5), (j[1], j[2])))
    return _in_one(lift(Program("tensor", "products", program.inputs, (t.reduce("sum", z, [2]),))))


def _image(program: Program, shape: tuple[int, ...]) -> Any:
    """An image made of the first input that has elements, if any has."""
    places = t.coordinates(shape)
    given = [x for x in program.inputs if x.type.numel]
    first = [t.cast(t.index_map(x, shape, tuple(sum(places) % n for n in x.type.shape)), f32) for x in given[:1]]
    return t.apply("tanh", *first) if first else t.literal(0.5, f32, shape)


def with_taps(program: Program) -> Any:
    """Loop IR of a sum over points of an image and what another has under taps, in one kernel."""
    shape, space = (16, 6, 8), (8, 8, 3, 16, 6)
    image = _image(program, shape)
    a, b, tap, n, point = t.coordinates(space)
    under = point + tap - 1
    left = t.index_map(image, space, (n, point, a))
    right = t.index_map(image, space, (n, under, b), (under, 5 - under))
    found = lift(Program("tensor", "taps", program.inputs, (t.reduce("sum", t.apply("mul", left, right), [3, 4]),)))
    return _but(found, shape)


def with_single_taps(program: Program) -> Any:
    """Loop IR of a sum over points of many images and what the same channel has under taps, in one kernel."""
    shape, space = (90, 6, 3), (3, 3, 90, 6)
    image = _image(program, shape)
    channel, tap, n, point = t.coordinates(space)
    under = point + tap - 1
    left = t.index_map(image, space, (n, point, channel))
    right = t.index_map(image, space, (n, under, channel), (under, 5 - under))
    found = lift(Program("tensor", "taps", program.inputs, (t.reduce("sum", t.apply("mul", left, right), [2, 3]),)))
    return _but(found, shape)


def with_few_results(program: Program) -> Any:
    """Loop IR of a convolution of an image of eight channels to three, in one kernel."""
    shape, space = (8, 6), (3, 6, 8, 3)
    image = _image(program, shape)
    result, point, channel, tap = t.coordinates(space)
    under = point + tap - 1
    left = t.index_map(image, space, (channel, under), (under, 5 - under))
    right = t.index_map(image, space, (channel, result * 2 + tap // 2))
    found = lift(Program("tensor", "taps", program.inputs, (t.reduce("sum", t.apply("mul", left, right), [2, 3]),)))
    return _but(found, shape)


def with_steps_apart(program: Program) -> Any:
    """Loop IR of a sum over taps of which a point sees every third, in one kernel."""
    shape, space = (8, 6), (18, 8)
    image = _image(program, shape)
    point, tap = t.coordinates(space)
    seen = t.index_map(image, space, (tap, (point - tap) // 3), ((point - tap) // 3, -((point - tap) % 3)))
    found = lift(Program("tensor", "steps", program.inputs, (t.reduce("sum", seen, [1]),)))
    return _but(found, shape)


def with_a_crop(program: Program) -> Any:
    """Loop IR of a sum of what taps read of an image backwards, of which they leave out an end, in one kernel."""
    shape, space = (8, 6), (4, 8, 3, 6)
    image = _image(program, shape)
    a, point, tap, channel = t.coordinates(space)
    place = 8 - point - tap
    left, right = (
        t.index_map(image, space, (place, channel), (place - 1, 7 - place)),
        t.index_map(image, space, (a, tap)),
    )
    found = lift(Program("tensor", "crop", program.inputs, (t.reduce("sum", t.apply("mul", left, right), [2, 3]),)))
    return _but(found, shape)


def with_rows_of_results(program: Program) -> Any:
    """Loop IR of a product of an image whose results lie row by row for each channel, in 16 bits, in one kernel."""
    shape, space = (3, 5, 8), (3, 8, 5, 8)
    image = _image(program, shape)
    n, channel, point, k = t.coordinates(space)
    left, right = t.index_map(image, space, (n, point, k)), t.index_map(image, space, (0, channel % 5, k))
    found = t.cast(t.reduce("sum", t.apply("mul", left, right), [3]), bf16)
    return _but(lift(Program("tensor", "rows", program.inputs, (found,))), shape)


def with_turned_results(program: Program) -> Any:
    """Loop IR of sums over windows, with results of them whose columns lie side by side, in one kernel."""
    given = [x for x in program.inputs if x.type.numel]
    places = t.coordinates((3, 8))
    first = [t.cast(t.index_map(x, (3, 8), tuple(sum(places) % n for n in x.type.shape)), f32) for x in given[:1]]
    image: Any = t.apply("tanh", *first) if first else t.literal(0.5, f32, (3, 8))
    row, point, k = t.coordinates((3, 7, 2))
    total = t.reduce("sum", t.index_map(image, (3, 7, 2), (row, point + k)), [2])
    found = _but(lift(Program("tensor", "windows", program.inputs, (total,))), (3, 8))
    *before, last = found.steps
    (store,) = last.stores
    turned = loop.Buffer("turned", Type(f32, (3, 7), (1, 3)))
    other = loop.Store(turned, store.index, loop.apply("sin", store.value))
    both = loop.Kernel(last.name, last.axes, (store, other), last.source)
    return loop.Program(found.name, found.inputs, (*before, both), (*found.results, turned))


def with_groups(program: Program) -> Any:
    """Loop IR of a product along channels of an image that are stored in groups."""
    given = [x for x in program.inputs if x.type.numel]
    places = t.coordinates((2, 4, 6))
    first = [t.cast(t.index_map(x, (2, 4, 6), tuple(sum(places) % n for n in x.type.shape)), f32) for x in given[:1]]
    image: Any = t.apply("tanh", *first) if first else t.literal(0.5, f32, (2, 4, 6))
    a, b, r = t.coordinates((6, 6, 8))
    sides = [t.index_map(image, (6, 6, 8), (r // 4, r % 4, x)) for x in (a, b)]
    found = lift(Program("tensor", "groups", program.inputs, (t.reduce("sum", t.apply("mul", *sides), [2]),)))
    return _but(found, (2, 4, 6))


def with_orders(program: Program) -> Any:
    """Loop IR of sums over the points of two images and one whose channels are last, in one kernel."""
    shape = (6, 4, 8)
    x = next((x for x in program.inputs if x.type.numel), None)
    if x is None:
        raise UserError("nothing is given")
    places = t.coordinates(shape)
    image = t.apply("tanh", t.cast(t.index_map(x, shape, tuple(sum(places) % n for n in x.type.shape)), f32))
    images = [t.apply(f, image) for f in ("neg", "exp", "tanh")]
    total = t.reduce("sum", t.apply("mul", t.apply("mul", images[0], images[1]), images[2]), [0, 2])
    found = lift(Program("tensor", "orders", program.inputs, (total,)))
    first, whole = found.steps[:2]
    kept = [first, whole, *(s for s in found.steps if s.reads == whole.writes)]
    last = kept[-1].writes[0]
    turned = loop.Buffer(last.name, Type(f32, shape, (32, 1, 4)))

    def visit(node: Any) -> Any:
        return turned if node is last else node

    stored = tuple(transform(s, visit, {}) for s in kept)
    others = tuple(transform(s, visit, {}) for s in found.steps if s not in kept)
    rest = _in_one(loop.Program(found.name, found.inputs, others, found.results))
    return loop.Program(found.name, found.inputs, (*stored, *map(flat_reductions, rest.steps)), found.results)


def with_shuffles(program: Program) -> Any:
    """Loop IR of a product of filters with an image whose channels are last, and hold neighbouring pixels."""
    shape, every = (3, 16, 8), (3, 4, 4, 32)
    x = next((x for x in program.inputs if x.type.numel), None)
    if x is None:
        raise UserError("nothing is given")

    def drawn(f: str, sizes: tuple[int, ...]) -> Any:
        number = sum(t.coordinates(sizes))
        return t.apply(f, t.cast(t.index_map(x, sizes, tuple(number % n for n in x.type.shape)), f32))

    a, b, c, r = t.coordinates(every)
    pixels = t.index_map(drawn("tanh", shape), every, (a, r // 2, r % 2 + b * 2))
    filters = t.index_map(drawn("neg", (4, 32)), every, (c, r))
    total = t.reduce("sum", t.apply("mul", pixels, filters), [3])
    found = CATALOG["fuse:view"].apply(lift(Program("tensor", "shuffles", program.inputs, (total,))))
    image = next(s for s in found.steps if s.writes[0].type.shape == shape).writes[0]
    turned = loop.Buffer(image.name, Type(f32, shape, (128, 1, 16)))

    def visit(node: Any) -> Any:
        return turned if node is image else node

    first, second, *rest = (transform(s, visit, {}) for s in found.steps)
    product = _in_one(loop.Program(found.name, found.inputs, tuple(rest), found.results))
    return loop.Program(found.name, found.inputs, (first, second, *product.steps), found.results)


def _but(found: Any, shape: tuple[int, ...]) -> Any:
    """What is stored first, in tensors of a shape, and the rest in one kernel."""
    stored = [s for s in found.steps if s.writes[0].type.shape == shape]
    rest = _in_one(loop.Program(found.name, found.inputs, found.steps[len(stored) :], found.results))
    return loop.Program(found.name, found.inputs, (*stored, *rest.steps), found.results)


def _in_one(found: Any) -> Any:
    """What others than results are made of, on its way in those that read it."""
    steps = [*found.steps]
    while (made := next((s for s in steps if {*s.writes}.isdisjoint(found.results)), None)) is not None:
        steps = [inline(s, made) for s in steps if s is not made]  # type: ignore[arg-type]
    return loop.Program(found.name, found.inputs, tuple(steps), found.results)


PATTERNS: dict[str, Callable[[Program], Any]] = {
    "remake:in_windows": lambda program: lift(with_rows(program)),  # before fusion, which leaves little that is stored
    "windows:places_read": with_places,
    "fuse:reduced_already": with_shares,
    "renew:only_changed": with_a_state,
    "schedule:factor_apart": with_products,
    "schedule:taps_apart": with_taps,
    "schedule:in_pieces_of_images": with_single_taps,
    "schedule:windows_of_windows": with_windows,
    "online:images_in_place": with_a_crop,
    "online:taps_after": with_few_results,
    "online:whole_steps": with_steps_apart,
    "online:turned_after": with_rows_of_results,
    "online:laid_apart": with_turned_results,
    "online:read_across": lambda program: lift(seasoned(program)),  # fusion leaves few copies
    "store_as_read:dimensions_of_products": with_groups,
    "schedule:lie_alike": with_orders,
    "store_as_read:pixels_together": with_shuffles,
    "lookups:store_beside": with_bias,
    "remake:read_beside": with_both,
    "remake:divide": with_states,  # fusion seldom makes one kernel of what is read apart in so few steps
}
"""Programs with what some rewrites look for, and random ones do not have."""


def alone(name: str, program: Program) -> tuple[Any, Any]:
    """What a rewrite is given of a random program, and what it makes of that; the same twice where it does not fire."""
    if name in PATTERNS:
        before = PATTERNS[name](program)
        return before, CATALOG[name].apply(before)
    program = seasoned(program)
    if name.startswith("tensor_to_loop"):
        log = Log(applications=[])
        lifted = lift(program, log=log)
        return program, lifted if any(f"{a.pass_name}:{a.rule}" == name for a in log.applications or []) else program
    before = lift(program)
    if name.startswith("store_as_read") and "channels" not in name:  # these look at what is left when views are gone
        before = CATALOG["fuse:view"].apply(before)
    elif name == "fuse:factors_apart":
        before = CATALOG["fuse:inline"].apply(CATALOG["fuse:view"].apply(before))
    elif name in ("fuse:extremes_once", "fuse:rows_gathered") or not name.startswith("fuse"):
        # fusion keeps little that is made fast; extremes and rows are looked at in what became one kernel
        before = fuse(before, Log(), Rates())
        before = CATALOG["store_as_read:narrow"].apply(before) if "channels" in name else before
    before = CATALOG["schedule:collapse"].apply(before) if name == "schedule:rows_apart" else before
    if name in ("schedule:share_rows", "schedule:split_frames"):  # which look at what is in a moving frame
        before = online(before, Log(), lambda kernel: "")
    return before, CATALOG[name].apply(before)
