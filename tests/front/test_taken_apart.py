"""Ops that are taken apart at capture: lists of tensors, beside eager, of which none is PyTorch's; frequencies; the
gradients of repeated edges.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")

import terrazzo  # noqa: E402
from terrazzo.front import foreach  # noqa: E402
from terrazzo.options import Options  # noqa: E402
from terrazzo.run import compiled  # noqa: E402

NUMBERS = [0.5, 2.0]


def steps(x: Any, y: Any, z: Any) -> list[Any]:
    """Numbers, numbers for each, tensors and lists beside lists; in place, and with what is given by name."""
    a, b, c = ([*t.abs().add(0.1).unbind()] for t in (x, y, z))
    out = torch._foreach_add(a, b, alpha=0.5)
    out = torch._foreach_addcmul(out, b, c, 0.25)
    torch._foreach_addcdiv_(out, a, c, value=-0.5)
    torch._foreach_lerp_(out, b, 0.1)
    out = torch._foreach_lerp(out, b, NUMBERS) if hasattr(torch, "_foreach_lerp") else out
    out = torch._foreach_maximum(out, 0.2)
    out = torch._foreach_minimum(out, NUMBERS)
    out = torch._foreach_clamp_max(out, b)
    out = torch._foreach_mul(torch._foreach_pow(out, 2), torch.tensor(3.0))
    norms = torch._foreach_norm(out)
    out = torch._foreach_div(torch._foreach_sqrt(out), NUMBERS)
    zeros = torch._foreach_sub(out, out)
    torch._foreach_copy_(zeros, a)
    torch._foreach_neg_(zeros)
    return [*out, *norms, *zeros, *torch._foreach_max(b), *torch._foreach_pow(2.0, a)]


def test_lists_of_tensors_are_compiled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 3, 5) for _ in range(3)]
    ours = terrazzo.compile(steps, *given, options=Options(target="interpreter", cache_dir=tmp_path))
    assert not ours.compiled.fallbacks
    torch.testing.assert_close(list(ours(*given)), steps(*given))


def frequencies(x: Any) -> list[Any]:
    """Frequencies of even and odd counts, which data has no part in."""
    kinds = (torch.fft.fftfreq, torch.fft.rfftfreq)
    return [0 * x + kind(n, d, device=x.device) for kind in kinds for n in (7, 8) for d in (1.0, 0.25)]


def test_frequencies_are_compiled(tmp_path: Path) -> None:
    x = torch.ones(1)
    ours = terrazzo.compile(frequencies, x, options=Options(target="interpreter", cache_dir=tmp_path))
    assert not ours.compiled.fallbacks
    assert all(map(torch.equal, ours(x), frequencies(x)))


@pytest.mark.parametrize(
    ("shape", "pad"),
    [((2, 3, 5), (2, 1)), ((2, 3, 5, 4), (2, 1, 0, 3)), ((2, 3, 5, 4, 3), (1, 2, 3, 0, 2, 2)), ((2, 3, 1), (3, 3))],
)
def test_gradients_of_repeated_edges_are_compiled(shape: Any, pad: Any, tmp_path: Path) -> None:
    def gradient(x: Any, y: Any) -> Any:
        padded = torch.nn.functional.pad(x, pad, mode="replicate")
        return torch.func.vjp(lambda x: torch.nn.functional.pad(x, pad, mode="replicate"), x)[1](padded * y)[0]

    torch.manual_seed(0)
    given = torch.randn(shape), torch.randn(())
    ours = terrazzo.compile(gradient, *given, options=Options(target="interpreter", cache_dir=tmp_path))
    assert not ours.compiled.fallbacks
    torch.testing.assert_close(ours(*given), gradient(*given))


def test_every_overload_is_known() -> None:
    """What is left are those that are listed."""
    found = {str(op).removeprefix("aten.") for op in foreach.decompositions()}
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::_foreach_")]
    names = {f"{s.name.removeprefix('aten::')}.{s.overload_name or 'default'}" for s in schemas}
    plain = {n for n in names if "out" not in n and not n.split(".")[0].endswith("_")}
    assert {n for n in plain - found if n not in foreach.LEFT and n.split(".")[0] not in foreach.LEFT} == set()


def test_a_factor_in_a_tensor_is_compiled(tmp_path: Path) -> None:
    """Newer Dynamo writes this as a multiplication that is added to, an op of Inductor's."""

    def step(x: Any, a: Any, b: Any, rate: Any) -> Any:
        return x.clone().addcmul_(a, b, value=rate)

    given = [torch.randn(4, 5) for _ in range(3)]
    seen: list[Any] = []

    def spy(*args: Any) -> Any:
        seen.append(compile_program(*args))
        return seen[-1]

    compile_program = compiled.compile_program
    torch._dynamo.reset()
    with patch.object(compiled, "compile_program", spy):
        ours = torch.compile(step, backend="terrazzo", options={"target": "interpreter", "cache_dir": tmp_path})
        torch.testing.assert_close(ours(*given, torch.tensor(0.5)), step(*given, torch.tensor(0.5)))
    assert not [f for done in seen for f in done.fallbacks]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("padding", [None, 3])
def test_gradients_of_bags_in_bfloat16(last: bool, padding: int | None) -> None:
    """What PyTorch says of the op's results is not so: it gives no numbers of bags where there is no padding."""
    offsets = torch.tensor([0, 5, 5, 30] + [40] * last)
    w, at = torch.randn(20, 16, dtype=torch.bfloat16), torch.randint(20, (40,))

    def gradient(fn: Any) -> torch.Tensor:
        leaf = w.clone().requires_grad_()
        out = fn(at, leaf, offsets, mode="sum", include_last_offset=last, padding_idx=padding)
        return torch.autograd.grad(out.float().square().sum(), leaf)[0]

    torch._dynamo.reset()
    bag = torch.nn.functional.embedding_bag
    compiled = torch.compile(lambda *args, **kwargs: bag(*args, **kwargs), backend="terrazzo")
    assert torch.equal(gradient(compiled), gradient(bag))
