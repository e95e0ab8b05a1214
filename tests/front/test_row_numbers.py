"""What a training graph keeps of attention's rows: right also where all keys of a row are hidden by a finite number."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import aot_module_simplified
from torch.nn import functional as F

from terrazzo.front.attention import attention_traced
from terrazzo.front.capture import capture
from terrazzo.front.decompositions import table
from terrazzo.front.partition import partition
from terrazzo.front.written_out import product
from terrazzo.interp import loop as interpreter
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import transformed
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import LOWER, stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.fusion import again

TOKENS, WIDTH = 32, 16


def attention(fill: float, added: bool) -> Callable[..., Any]:
    """Attention in which a number hides some keys of every row, and all of one row."""
    hidden = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    hidden[5] = hidden[:, 20:] = True

    def run(q: Any, k: Any, v: Any) -> Any:
        if added:
            bias = torch.zeros(TOKENS, TOKENS).masked_fill(hidden, fill).to(q.dtype)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        scores = (q @ k.transpose(-1, -2) * WIDTH**-0.5).masked_fill(hidden, fill)
        return torch.softmax(scores, -1) @ v

    return run


def trained(run: Callable[..., Any], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result and the gradients of its squares' sum."""
    with torch.enable_grad():
        args = [x.detach().requires_grad_() for x in given]
        y = run(*args)
        loss = (y.to(torch.promote_types(y.dtype, torch.float32)) ** 2).sum()
        return [y.detach(), *torch.autograd.grad(loss, args)]


def kept(run: Callable[..., Any], given: list[torch.Tensor], exactly: bool = False) -> tuple[list[torch.Tensor], int]:
    """The same as the two graphs of a partition compute it, and how many numbers of rows the first one keeps."""
    rows: list[int] = []

    def apart(joint: Any, inputs: Any, **options: Any) -> Any:
        forward, backward = partition(joint, inputs, wide=True, exactly=exactly, **options)
        (output,) = forward.graph.find_nodes(op="output")
        shapes = [tuple(y.meta["val"].shape) for y in output.args[0] if isinstance(y, torch.fx.Node)]
        rows.append(sum(s[-2:] == (TOKENS, 1) for s in shapes))
        return forward, backward

    def backend(gm: Any, inputs: Any) -> Any:
        with attention_traced():
            options = {"fw_compiler": lambda graph, _: graph.forward, "decompositions": table()}
            return aot_module_simplified(gm, inputs, partition_fn=apart, **options)

    torch._dynamo.reset()
    return trained(torch.compile(run, backend=backend), given), rows[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fill", "added", "numbers"),
    [(-3e38, True, 2), (-1e4, True, 2), (-3e38, False, 2), (-1e9, False, 2)],
)
def test_rows_of_which_all_is_hidden_weigh_all_keys_alike(
    fill: float, added: bool, numbers: int, dtype: torch.dtype
) -> None:
    """The logarithm of their number is lost beside -3e38: weights were 1, and results sums instead of means. Beside
    -1e4 scores are rounded to 0.001, so errors are those of several draws.
    """
    run, errors, least = attention(fill, added), torch.zeros(2, 4), torch.zeros(4)
    for seed in range(6):
        torch.manual_seed(seed)
        given = [torch.randn(2, 2, TOKENS, WIDTH).to(dtype) for _ in range(3)]
        ours, rows = kept(run, given)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            eager, right = trained(run, given), trained(run, [x.double() for x in given])
        assert rows in (0, numbers)
        for found, of in zip((ours, eager), errors, strict=True):
            of += torch.tensor([(a.double() - c).square().mean() for a, c in zip(found, right, strict=True)])
        least += torch.tensor([torch.finfo(dtype).eps ** 2 * c.square().mean() for c in right])
    assert bool((errors[0] <= 4 * torch.maximum(errors[1], least)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_gradients_add_up_to_nothing_where_that_is_asked_for(dtype: torch.dtype) -> None:
    """What keys have in common is multiplied by such a sum: there, the rounding of results is the error of queries'
    gradients, as it is in PyTorch's own kernels, but not where weights are kept.
    """
    torch.manual_seed(0)
    wide, common = (2, 2, TOKENS, WIDTH), torch.randn(3, WIDTH)
    given = [(0.2 * torch.randn(wide) + x).to(dtype) for x in (common[0] * 0, common[1] * 2, common[2])]

    def written_out(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2) * WIDTH**-0.5, -1) @ v

    def unrounded(q: Any, k: Any, v: Any) -> Any:
        scores = product(None, dtype, False, q, k.transpose(-1, -2)) * WIDTH**-0.5
        return product(None, dtype, True, torch.softmax(scores, -1), v)

    def error(found: list[torch.Tensor]) -> float:
        return float((found[1].double() - right[1]).norm() / right[1].norm())

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        right = trained(F.scaled_dot_product_attention, [x.double() for x in given])
        rounded, exact = (kept(unrounded, given, way)[0] for way in (False, True))
    assert error(exact) <= error(trained(written_out, given)) < error(rounded) / 2


@pytest.mark.parametrize("apart", [0.0, 1.0, 30.0])
def test_what_values_have_in_common_has_no_error_in_float32(apart: float) -> None:
    """Regions of an image that are much alike, for one: the gradient of weights, and what its rows are summed to, had
    an error of all of the values, and keys were multiplied by it.
    """
    torch.manual_seed(0)
    common = torch.randn(2, WIDTH)
    given = [torch.randn(2, 2, 64, WIDTH), *(torch.randn(2, 2, 19, WIDTH) + apart * x for x in common)]

    def run(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.mT * WIDTH**-0.5, -1) @ v

    ours, eager, right = kept(run, given)[0], trained(run, given), trained(run, [x.double() for x in given])
    for a, b, c in zip(ours, eager, right, strict=True):
        assert (a - c).norm() <= 1.6 * (b - c).norm()


def test_rows_that_see_nothing_give_nothing_of_what_values_have_in_common() -> None:
    """Weights that are all 0 beside those that are taken around their mean in the same graph."""
    torch.manual_seed(0)
    given = [torch.randn(1, 2, TOKENS, WIDTH) + x for x in (0, 0, 3)]
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(-1)

    def run(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    ours = kept(run, [x.bfloat16() for x in given], True)[0]
    for found, right in zip(ours, trained(run, [x.bfloat16().double() for x in given]), strict=True):
        assert (found[..., 0, :] - right[..., 0, :]).abs().max() <= 0.02 * right.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_that_few_keys_have_are_in_common_with_no_others(dtype: torch.dtype) -> None:
    """Of two keys of eight, which are hidden, values are 100 times as large: their mean is not what others have."""
    torch.manual_seed(0)
    given = [torch.randn(1, 2, 8, WIDTH) + x for x in (0, 0, 3)]
    given[2][..., 6:, :] *= 100
    hidden = torch.zeros(8, 8)
    hidden[:, 6:] = -torch.inf

    def written_out(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.transpose(-1, -2) + hidden.to(q.dtype)
        return torch.softmax(scores, -1, torch.promote_types(q.dtype, torch.float32)).to(v.dtype) @ v

    def unrounded(q: Any, k: Any, v: Any) -> Any:
        scores = product(None, dtype, False, q, k.transpose(-1, -2)) + hidden
        return product(None, dtype, True, torch.softmax(scores, -1), v)

    narrow = [x.to(dtype) for x in given]
    right = trained(written_out, [x.double() for x in narrow])
    ours, eager = kept(unrounded, narrow, True)[0], trained(written_out, narrow)
    for found, theirs, exact in zip(ours, eager, right, strict=True):
        assert (found.double() - exact).norm() <= 2 * (theirs.double() - exact).norm()


@pytest.mark.parametrize(("mask", "numbers"), [("none", 1), ("causal", 1), ("places", 1), ("bias", 2)])
def test_products_that_are_hidden_by_infinity_keep_one_number(mask: str, numbers: int) -> None:
    """Their largest is rounded itself, and as large as what is added to it."""
    places = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(3)
    bias = torch.randn(TOKENS, TOKENS, dtype=torch.bfloat16)
    said: dict[str, dict[str, Any]] = {
        "none": {},
        "causal": {"is_causal": True},
        "places": {"attn_mask": places},
        "bias": {"attn_mask": bias},
    }
    run = functools.partial(F.scaled_dot_product_attention, **said[mask])
    given = [torch.randn(1, 2, TOKENS, WIDTH, dtype=torch.bfloat16) for _ in range(3)]
    assert kept(lambda *x: run(*x), given)[1] == numbers


@pytest.mark.parametrize("equations", [("bhid,bhjd->bhij", "bhij,bhjd->bhid"), ("bihd,bjhd->bhij", "bhij,bjhd->bihd")])
def test_einsums_keep_numbers_of_each_row(equations: tuple[str, str]) -> None:
    """They give weights a dimension of one element, and move it."""

    def run(q: Any, k: Any, v: Any) -> Any:
        weights = torch.softmax(torch.einsum(equations[0], q, k) * WIDTH**-0.5, -1)
        return torch.einsum(equations[1], weights, v)

    torch.manual_seed(0)
    given = [torch.randn(2, TOKENS, TOKENS, WIDTH) for _ in range(3)]
    ours, rows = kept(run, given)
    assert rows == 2
    for x, y in zip(ours, trained(run, given), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("hidden", "shifted"),
    [(None, True), (-math.inf, True), (-1e4, False), (torch.tensor(-math.inf), False), ("far", True)],
)
@pytest.mark.parametrize("common", [0.0, 5.0])
def test_what_queries_and_keys_have_in_common_has_no_error_in_float32(
    common: float, hidden: Any, shifted: bool
) -> None:
    """Weights made of one number for each row all had its rounding, which is that of the largest score, and what keys
    have in common was multiplied by what rows of the scores' gradient add up to: 5 times eager mode's error.
    """
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)

    def run(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.mT * WIDTH**-0.5
        if hidden == "far":
            scores = scores - 0.1 * mask.to(q.dtype)
        elif hidden is not None:
            scores = torch.where(mask, hidden, scores)
        return torch.softmax(scores, -1) @ v

    torch.manual_seed(0)
    errors = torch.zeros(2, 3)
    for _ in range(8):
        q, k, v = (torch.randn(2, 2, TOKENS, WIDTH) for _ in range(3))
        given = [q + common * torch.randn(1, 2, 1, WIDTH), k + common * torch.randn(1, 2, 1, WIDTH), v]
        (ours, _), eager, right = kept(run, given), trained(run, given), trained(run, [x.double() for x in given])
        for found, of in zip((ours, eager), errors, strict=True):
            of += torch.tensor([(a - c).norm() / c.norm() for a, c in zip(found[1:], right[1:], strict=True)])
    of_queries, of_keys, of_values = errors[0] / errors[1]
    assert max(of_queries, of_keys, of_values) <= 1.7
    assert not (common and shifted) or of_queries <= 0.8


def step(run: Callable[..., Any]) -> tuple[list[torch.Tensor], list[l.Program]]:
    """A training step captured as one program: what it is given, and its kernels when the gradients of its
    softmaxes have been rewritten, and as they are scheduled.
    """
    torch.manual_seed(0)
    given = [torch.randn(2, 2, TOKENS, WIDTH, dtype=torch.bfloat16) for _ in range(3)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        program = capture(lambda *x: trained(run, list(x)), given).program
    upper = LOWER[: LOWER.index("schedule")]
    found = stages(program, Options(target="sm_90a", libraries="never"), Log(), upper)
    return given, [p for name, p, _ in found if name.name in ("gradients", upper[-1])]


@pytest.mark.parametrize(("fill", "numbers"), [(-3e38, 2), (-float("inf"), 1)])
def test_a_step_in_one_program_keeps_what_its_rows_need(fill: float, numbers: int) -> None:
    """The same, where forward and backward passes are rewritten together."""

    def run(q: Any, k: Any, v: Any) -> Any:
        rows = torch.arange(TOKENS)
        hidden = (rows[None] > rows[:, None]) if numbers == 1 else (rows[:, None] == 5) | (rows[None] > 20)
        scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * WIDTH**-0.5
        return torch.matmul(torch.softmax(scores.masked_fill(hidden, fill), -1), v.float()).to(q.dtype)

    given, (rewritten, last) = step(run)
    kernels = [s for s in rewritten.steps if isinstance(s, l.Kernel)]
    assert sum(b.name.endswith(("_sums", "_top")) for s in kernels for b in s.writes) == numbers
    eager, right = trained(run, given), trained(run, [x.double() for x in given])
    inputs = {b.name: x.float().numpy() for b, x in zip(last.inputs, given, strict=True)}
    for a, b, c in zip(interpreter.run(last, inputs), eager, right, strict=True):
        mine, theirs = (
            float((x.double() - c).abs().square().mean().sqrt()) for x in (torch.as_tensor(a.astype("f4")), b)
        )
        assert mine <= 2 * max(theirs, torch.finfo(torch.bfloat16).eps * float(c.abs().square().mean().sqrt()))


WEIGHTS = """\
@loop
def f(s: f32[8, 16], top: f32[8], rows: f32[8]):
    with kernel('w', w=f32[8, 16]):
        for a0 in free(8):
            v0 = index(a0)
            in1 = top[a0]
            in2 = rows[a0]
            for a1 in free(16):
                v1 = index(a1)
                v2 = le(v1, v0)
                in0 = s[a0, a1]
                v3 = where(v2, in0, f32(-inf))
                v4 = sub(v3, in1)
                v5 = sub(v4, in2)
                v6 = mul(v5, f32(1.4426950408889634))
                v7 = approx_exp2(v6)
                w[a0, a1] = v7
    return (w,)
"""


def test_what_is_hidden_weighs_nothing_where_rows_have_two_numbers() -> None:
    """Weights have the condition outside of their exponentials, so that steps of which all is hidden are not visited;
    and the largest score is subtracted before anything is multiplied, which would round -1e9 twice.
    """
    (kernel,) = parse(WEIGHTS).steps
    (store,) = transformed(kernel.stores, again._simpler)
    assert store.value.fn.name == "where" and store.value.args[2].value == 0.0
    (power,) = store.value.args[1].args
    assert power.fn.name == "mul" and [power.args[0].fn.name, power.args[0].args[0].fn.name] == ["sub", "sub"]
    assert isinstance(power.args[0].args[0].args[0], l.Load)


def test_what_is_hidden_weighs_nothing_where_rows_have_a_factor() -> None:
    last = "v5 = exp(v4)\n                v6 = mul(v5, in2)\n                w[a0, a1] = v6\n    return"
    (kernel,) = parse(WEIGHTS[: WEIGHTS.index("v5 =")] + last + WEIGHTS[WEIGHTS.index(" (w,)") :]).steps
    (store,) = transformed(kernel.stores, again._simpler)
    chosen, factor = store.value.args
    assert store.value.fn.name == "mul" and isinstance(factor, l.Load)
    assert chosen.fn.name == "where" and chosen.args[2].value == 0.0
    assert chosen.args[1].fn.name == "exp" and isinstance(chosen.args[1].args[0].args[0], l.Load)


@pytest.mark.parametrize("shape", [(TOKENS // 2, 2 * TOKENS), (TOKENS, 2, TOKENS // 2)])
def test_rows_of_a_softmax_may_be_others_than_those_of_products(shape: tuple[int, ...]) -> None:
    """A number for each of them is none for the others, and keys' mean is not taken off all of one alike."""

    def run(q: Any, k: Any, v: Any) -> Any:
        scores = (q @ k.mT * WIDTH**-0.5).view(2, 2, *shape)
        return torch.softmax(scores, -1).view(2, 2, TOKENS, TOKENS) @ v

    torch.manual_seed(0)
    given = [torch.randn(2, 2, TOKENS, WIDTH) + 3 * torch.randn(1, 2, 1, WIDTH) for _ in range(3)]
    ours, eager, right = kept(run, given)[0], trained(run, given), trained(run, [x.double() for x in given])
    for a, b, c in zip(ours, eager, right, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm()


@pytest.mark.parametrize("scales", [(1.0, 1.0), (WIDTH**-0.5, 1.0), (1.0, WIDTH**-0.5)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_temperature_that_is_learned_has_rows_that_add_up_to_nothing(
    masked: bool, scales: tuple[float, float]
) -> None:
    """Its gradient multiplies every row of the scores' gradient by products, which have much in common: in float32 rows
    are summed from what they are to cancel, as in eager mode. A constant has no gradient.
    """
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)

    def run(q: Any, k: Any, v: Any, temperature: Any) -> Any:
        scores = q @ k.transpose(-1, -2) * scales[0] * temperature.exp() * scales[1]
        return torch.softmax(scores.masked_fill(hidden, -math.inf) if masked else scores, -1) @ v

    torch.manual_seed(0)
    given = [torch.randn(2, 4, TOKENS, WIDTH) for _ in range(3)]
    temperature = torch.rand(4, 1, 1)
    assert kept(run, [*given, temperature])[1] == 0
    assert kept(lambda *x: run(*x, temperature), given)[1] == 2
