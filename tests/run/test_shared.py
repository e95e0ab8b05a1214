"""Views that ops of PyTorch give of each other's results are not copied; what may be written or given back twice is."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import terrazzo  # noqa: E402


def copies(fn: Any, *args: Any) -> int:
    """How often a compiled call copies what an op gave."""
    compiled = terrazzo.compile(fn, *args, options={"target": "cpu"})
    torch.testing.assert_close(compiled(*args), fn(*args))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        again = compiled(*args)
    torch.testing.assert_close(again, fn(*args))
    return sum(e.count for e in found.key_averages() if e.key == "aten::copy_")


def as_complex(x: Any) -> Any:
    return torch.view_as_complex(x)


X, Y = torch.randn(8, 4, 2), torch.randn(4, 2)


def test_transforms_of_complex_numbers_are_views_to_their_ends() -> None:
    assert copies(lambda x: torch.view_as_real(torch.fft.fft(as_complex(x))), X) == 0


def test_products_of_complex_numbers_are_ours_and_copied_once() -> None:
    """They are given back as what PyTorch makes of pairs of ours, in memory of their own."""
    assert copies(lambda x, y: torch.view_as_real(as_complex(x) * as_complex(y)), X, Y) == 1


def test_what_a_kernel_computed_is_copied_since_its_memory_is_used_again() -> None:
    def fn(x: Any, y: Any) -> Any:
        z = as_complex(x + 1)
        more = (x * 3 + y).relu()  # takes the memory of x + 1
        return torch.view_as_real(z * z), more

    assert copies(fn, X, Y) == 1


def test_results_have_memory_of_their_own() -> None:
    def fn(x: Any, y: Any) -> Any:
        z = as_complex(x) * as_complex(y)
        return torch.view_as_real(z), torch.view_as_real(z)[..., 0] + 1, torch.view_as_real(z.conj().resolve_conj())

    compiled = terrazzo.compile(fn, X, Y, options={"target": "cpu"})
    before = X.clone()
    first, second, third = compiled(X, Y)
    expected = fn(X, Y)
    first.zero_()
    torch.testing.assert_close([second, third], list(expected[1:]))
    torch.testing.assert_close(compiled(X, Y), expected)
    assert torch.equal(X, before)


def test_an_input_is_not_given_back() -> None:
    compiled = terrazzo.compile(lambda x: (torch.view_as_real(as_complex(x) * 1j), x + 1), X, options={"target": "cpu"})
    rotated, _ = compiled(X)
    before = X.clone()
    rotated.zero_()
    assert torch.equal(X, before)
