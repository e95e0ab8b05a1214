"""Products that are only added are one product, whose steps go along one tensor and then the next."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.hw.sass import sass
from tests.kernels.test_quantised import as_exact_as_eager, numbers
from tests.rules.test_catalog import assert_same, example

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse, show
from terrazzo.ir.types import DTYPES, Type
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.fusion import joined
from terrazzo.targets.cuda.check import check

H = gpu("sm_90a")
Case = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]


def r(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def two(x: Any, w: Any, y: Any, u: Any) -> Any:
    return F.linear(x, w) + F.linear(y, u)


def biased(x: Any, w: Any, b: Any, y: Any, u: Any, c: Any) -> Any:
    return torch.tanh(F.linear(x, w, b) + F.linear(y, u, c))


def three(x: Any, w: Any, y: Any, u: Any, z: Any, v: Any) -> Any:
    return F.linear(x, w) + F.linear(y, u) + F.linear(z, v)


def across(x: Any, w: Any, y: Any, u: Any) -> Any:
    return x @ w + y @ u


def concatenation(x: Any, y: Any, w: Any) -> Any:
    return F.linear(torch.cat([x, y], -1), w)


M, N = 72, 80
CASES: dict[str, Case] = {
    "two": (two, (r(M, 128), r(N, 128), r(M, 64), r(N, 64))),
    "a bias each": (biased, (r(M, 128), r(N, 128), r(N), r(M, 192), r(N, 192), r(N))),
    "ends within a step": (two, (r(M, 72), r(N, 72), r(M, 128), r(N, 128))),
    "both end within a step": (two, (r(M, 72), r(N, 72), r(M, 104), r(N, 104))),
    "three": (three, (r(M, 64), r(N, 64), r(M, 128), r(N, 128), r(M, 72), r(N, 72))),
    "memory across": (across, (r(M, 128), r(128, N), r(M, 64), r(64, N))),
    "a batch": (across, (r(3, 72, 128), r(3, 128, 80), r(3, 72, 64), r(3, 64, 80))),
    "half": (two, tuple(r(*s, dtype=torch.float16) for s in ((M, 64), (N, 64), (M, 128), (N, 128)))),
    "concatenated": (concatenation, (r(M, 128), r(M, 72), r(N, 200))),
    "many steps of few rows": (two, (r(16, 1024), r(256, 1024), r(16, 512), r(256, 512))),
}


def lowered(fn: Any, given: tuple[torch.Tensor, ...], **options: Any) -> Any:
    return lowering(capture(fn, given, {}).program, Options(target="sm_90a", libraries="never", **options))


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_one_kernel_is_as_exact_as_eager(name: str, seed: int | None) -> None:
    """In the fair order and in others; each factor comes to the same slots, from one tensor and then from the next."""
    fn, given = CASES[name]
    program = lowered(fn, given).at("kernel")
    (kernel,) = program.steps
    check(program, H)
    boxes = {s.tensor for s in k.walk(kernel.body) if isinstance(s, k.TensorLoad)}
    assert len(boxes) == len([x for x in given if x.ndim > 1])
    (y,) = simulator.run(program, {b.name: numbers(x) for b, x in zip(program.inputs, given, strict=True)}, seed=seed)
    as_exact_as_eager(y, fn, given)


def fewest(steps: Sequence[l.Kernel]) -> float:
    """A price by which fewer products are cheaper."""
    return float(sum(len(s.carried) + 1 for s in steps))


def test_the_example() -> None:
    before, after = example(inspect.getdoc(joined.products_joined) or "", "products_joined")
    found = joined.products_joined(parse(before), Log(), fewest)
    assert show(found) == after
    assert_same(parse(before), found)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x, w, y, u: F.linear(x, w) * F.linear(y, u), ((8, 16), (8, 16), (8, 24), (8, 24))),
        (
            lambda x, w, y, u: (a := F.linear(x, w)) + torch.relu(a + F.linear(y, u)),
            ((8, 16), (8, 16), (8, 24), (8, 24)),
        ),
        (lambda x, w, y, u: F.linear(x, w) + y @ u, ((8, 16), (8, 16), (8, 24), (24, 8))),
        (lambda x, w, y: F.linear(x, w) + y, ((8, 16), (8, 16), (8, 8))),
    ],
    ids=["multiplied", "used twice", "another layout", "one product"],
)
def test_what_is_not_only_added_or_lies_otherwise_stays(fn: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    before = lowered(fn, tuple(r(*s) for s in shapes)).at("loop")
    assert joined.products_joined(before, Log(), fewest) is before


def test_what_is_pinned_is_stored() -> None:
    shapes = (4096, 4096), (4096, 4096), (4096, 1024), (4096, 1024)
    given = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    assert [s.name for s in lowered(two, given, materialize=("mm_1",)).at("loop").steps] == ["mm_1", "add"]


@pytest.mark.parametrize(("m", "k", "n"), [(4096, 4096, 4096), (512, 3584, 18944), (2048, 4096, 14336)])
def test_the_sum_of_two_products_is_one_kernel(m: int, k: int, n: int, tmp_path: Path) -> None:
    """Where the second one is short, what it would store and read again is dear; nothing spills."""
    shapes = (m, k), (n, k), (m, 1024), (n, 1024)
    given = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    (kernel,) = lowered(two, given).at("kernel").steps
    found = "\n".join(sass(kernel, "sm_90a", tmp_path))
    assert "HGMMA" in found and "STL" not in found


def test_a_concatenation_is_multiplied_and_not_stored() -> None:
    shapes = (4096, 2048), (4096, 512), (1024, 2560)
    given = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    (kernel,) = lowered(concatenation, given).at("kernel").steps
    assert [b.type.static_shape for b in kernel.params] == [*shapes, (4096, 1024)]


def test_too_many_tensors_are_stored_one_after_the_other() -> None:
    """Each has a tensor map among the arguments of the kernel."""
    given = tuple(torch.empty(4096, 64, dtype=torch.bfloat16, device="meta") for _ in range(9))
    w = torch.empty(1024, 9 * 64, dtype=torch.bfloat16, device="meta")
    done = lowered(lambda w, *x: F.linear(torch.cat(x, -1), w), (w, *given))
    first, _ = done.at("kernel").steps
    assert first.writes[0].type.static_shape == (4096, 9 * 64)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_is_as_exact_as_eager(name: str) -> None:
    fn, given = CASES[name]
    there = tuple(x.cuda() for x in given)
    ours = terrazzo.compile(fn, *there, options=Options(libraries="never"))
    as_exact_as_eager(ours(*there).float().cpu().numpy(), fn, given)


@pytest.mark.parametrize(
    ("rows", "deep", "hidden", "out"), [(65536, 64, 256, 64), (65536, 256, 256, 256), (32768, 128, 128, 16)]
)
def test_two_products_with_few_numbers_in_between_are_one_kernel(rows: int, deep: int, hidden: int, out: int) -> None:
    """A chain, whose first sums never leave registers."""
    shapes = (rows, deep), (hidden, deep), (hidden,), (out, hidden), (out,)
    given = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    (kernel,) = lowered(lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w, b)), v, c), given).at("kernel").steps
    assert len({s.instruction for s in k.walk(kernel.body) if isinstance(s, k.MultiplyAsync)}) in (1, 2)


def test_long_sums_that_are_rounded_on_their_way_are_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps add to a state is rounded after each: who asks for a sum's addends asks for those of a rounded one."""
    inner, asked = joined._addends, 0

    def counted(x: Any) -> Any:
        nonlocal asked
        asked += 1
        return inner(x)

    monkeypatch.setattr(joined, "_addends", counted)
    total: Any = l.apply("f32", l.Load.make(l.Buffer("y0", Type(DTYPES["bf16"], (4,))), (0,)))
    for n in range(40):
        more = l.apply("f32", l.Load.make(l.Buffer(f"x{n}", Type(DTYPES["bf16"], (4,))), (0,)))
        total = l.apply("f32", l.apply("bf16", l.apply("add", total, more)))
    assert len(joined._addends(total)) == 41
    assert asked < 200
