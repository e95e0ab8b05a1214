"""Sums of products as one product: what is taken, what is not, and that it means the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from terrazzo.bench.programs.registry import Gradients
from terrazzo.front.capture import capture
from terrazzo.interp import torch as interpreter
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import topological
from terrazzo.ir.verify import verify
from terrazzo.rewrite.rule import Log
from terrazzo.rules.torch_to_tensor.together import sums_together
from terrazzo.targets import target

torch = pytest.importorskip("torch")
RATES = target("sm_90a").rates
FREE = replace(RATES, byte=0.0)  # so that fewer kernels are always better


def count(program: Any, name: str) -> int:
    return sum(isinstance(n, Aten) and n.name == name for n in topological(program.results))


def together(fn: Any, *inputs: Any, rates: Any = FREE) -> tuple[Any, Any]:
    """The program as captured, and with its sums together; both are run, in float64."""
    captured = capture(fn, inputs)
    log = Log()
    made = sums_together(captured.program, log, rates)
    verify(made, "sums_together")
    given = {**captured.bound, **captured.given(inputs, {})}
    old, new = (interpreter.run(p, given, precise=True) for p in (captured.program, made))
    for a, b in zip(old, new, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, check_dtype=False)
    return captured.program, made


@pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}, {"batch_first": True}])
def test_gradients_of_a_recurrent_net(kind: Any, options: dict[str, Any]) -> None:
    """As many products of gradients by weights as there are weights, whatever the number of steps."""
    torch.manual_seed(0)
    net = Gradients(kind(4, 6, **options))
    found = {}
    for steps in (4, 7):
        x = torch.randn(3, steps, 4) if "batch_first" in options else torch.randn(steps, 3, 4)
        before, made = together(net, x)
        weights = {n.result.shape for n in topological(made.results) if isinstance(n, Aten) and "mm" in n.name}
        found[steps] = [
            sum(
                isinstance(n, Aten) and n.name == "aten.mm.default" and 3 not in n.result.shape
                for n in topological(p.results)
            )
            for p in (before, made)
        ]
        assert weights and count(made, "aten.add.Tensor") < count(before, "aten.add.Tensor")
    assert found[4][1] == found[7][1] < found[4][0] < found[7][0]


def products(*pairs: Any) -> Any:
    total = pairs[0].t() @ pairs[1]
    for x, y in zip(pairs[2::2], pairs[3::2], strict=True):
        total = total + x.t() @ y
    return total


def test_products_of_other_lengths_and_from_either_side() -> None:
    pairs = [torch.randn(k, n) for k in (2, 5, 3, 4) for n in (6, 7)]
    _, made = together(products, *pairs)
    assert count(made, "aten.mm.default") == 1 and count(made, "aten.add.Tensor") == 0

    def turned(*xs: Any) -> Any:
        return xs[0] @ xs[1] + (xs[2].t() @ xs[3].t()).t() + xs[4] @ xs[5]

    shapes = ((6, 2), (2, 7), (3, 7), (6, 3), (6, 5), (5, 7))
    _, made = together(turned, *(torch.randn(s) for s in shapes))
    assert count(made, "aten.mm.default") == 1


def test_the_order_of_what_is_one_below_the_other_already() -> None:
    """Which is used again; where both sides lie so, in different orders, one of them is made anew."""

    def fn(*xs: Any) -> Any:
        return products(*xs), torch.stack(xs[::2][::-1]), torch.cat(xs[1::2])

    before, made = together(fn, *(torch.randn(2, n) for _ in range(4) for n in (6, 7)))
    assert count(made, "aten.mm.default") == 1
    assert count(made, "aten.stack.default") == 1 and count(made, "aten.cat.default") == 2
    assert count(before, "aten.cat.default") == 1


def test_what_is_left_alone() -> None:
    x, y, z = (torch.randn(2, 6) for _ in range(3))

    def shared(x: Any, y: Any, z: Any) -> Any:
        return x.t() @ y + x.t() @ z + x.t() @ x

    def two(x: Any, y: Any, z: Any) -> Any:
        return x.t() @ y + z.t() @ y

    def read(x: Any, y: Any, z: Any) -> Any:
        a = x.t() @ y
        return a + y.t() @ z + z.t() @ x, a

    def scaled(x: Any, y: Any, z: Any) -> Any:
        return torch.add(x.t() @ y + y.t() @ z, z.t() @ x, alpha=2)

    for fn in (shared, two, read, scaled):
        before, made = together(fn, x, y, z)
        assert made is before, fn.__name__


def test_large_products_are_not_worth_copies() -> None:
    """Twelve layers that share a weight: what they multiply is as large as what they make."""
    with torch.device("meta"):
        pairs = [torch.empty(4096, n, dtype=torch.bfloat16) for _ in range(12) for n in (768, 3072)]
        steps = [torch.empty(32, n, dtype=torch.bfloat16) for _ in range(12) for n in (768, 3072)]
    for xs, taken in ((pairs, False), (steps, True)):
        log = Log()
        captured = capture(products, xs).program
        assert (sums_together(captured, log, RATES) is not captured) == taken
        (event,) = [e for e in log.events if e.rule == "sums_together"]
        assert event.fired == taken and event.reason.startswith("12 products: ") and "us together" in event.reason
