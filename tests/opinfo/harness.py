"""PyTorch's operator database through Terrazzo: every operator, dtype and sample, judged by float64.

A *level* runs one call and returns its results: "tensor" and "loop" by the interpreters, "cpu" compiled. All levels come through
`torch.compile`-style capture of the one call. An operator's verdict for a dtype is the worst of its samples:

own        all samples right, all of it compiled by our own rules
fallback   right, but PyTorch ran some ops (they are named)
random     right in shape and dtype; the values are random
skipped    PyTorch's own eager call fails, or the call cannot be captured (why)
wrong      a wrong value, shape or dtype
crash      an error that is no Limitation: whatever was captured must run
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from terrazzo.errors import Limitation, TerrazzoError
from terrazzo.front.capture import Captured, capture
from terrazzo.interp import loop as loop_interp
from terrazzo.interp import tensor as tensor_interp
from terrazzo.interp.torch import call_numpy, from_numpy, to_numpy
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.node import topological
from terrazzo.options import Options
from terrazzo.pipelines import stages
from terrazzo.rewrite.rule import Log

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
ORDER = ("own", "random", "fallback", "skipped", "crash", "wrong")
SECONDS = 60
"""For one sample; a slower one counts as skipped, with that reason."""


@dataclass
class Verdict:
    """What became of one operator and dtype."""

    op: str
    dtype: str
    verdict: str = "own"
    samples: int = 0
    reason: str = ""
    fallbacks: list[str] = field(default_factory=list)

    def worsen(self, verdict: str, reason: str = "") -> None:
        """Keep the worst of what was seen."""
        if ORDER.index(verdict) > ORDER.index(self.verdict):
            self.verdict, self.reason = verdict, reason


def operators(pattern: str = "") -> list[Any]:
    """The entries of the database whose name contains `pattern`, named apart by their variant."""
    return [op for op in op_db if pattern in op.name]


def name_of(op: Any) -> str:
    """The operator's name with its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def judge(op: Any, dtype: torch.dtype, level: str, most: int | None = None) -> Verdict:
    """Run the samples of an operator for a dtype at a level; the first `most` of them, or all."""
    verdict = Verdict(name_of(op), str(dtype).removeprefix("torch."))
    for k, sample in enumerate(_samples(op, dtype, verdict)):
        if most is not None and k >= most:
            break
        verdict.samples += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with _limit(SECONDS):
                    _one(op, sample, level, verdict)
            except TimeoutError:
                verdict.worsen("skipped", f"a sample took longer than {SECONDS} s")
        if verdict.verdict in ("wrong", "crash"):
            break
    return verdict


def _samples(op: Any, dtype: torch.dtype, verdict: Verdict) -> Iterator[Any]:
    try:
        torch.manual_seed(0)
        yield from op.sample_inputs("cpu", dtype, requires_grad=False)
    except Exception as e:
        verdict.worsen("skipped", f"PyTorch makes no samples: {type(e).__name__}")


def _one(op: Any, sample: Any, level: str, verdict: Verdict) -> None:
    def call(*args: Any, **kwargs: Any) -> Any:
        return op.op(*args, **kwargs)

    args, kwargs = (sample.input, *sample.args), sample.kwargs
    try:
        torch.manual_seed(0)
        given, named = pytree.tree_map(_copy, (args, kwargs))
        expected = pytree.tree_leaves(call(*given, **named))
    except Exception as e:
        verdict.worsen("skipped", f"eager fails: {type(e).__name__}")
        return
    if not expected or not all(isinstance(x, torch.Tensor) and x.layout is torch.strided for x in expected):
        verdict.worsen("skipped", "the result is no dense tensor")
        return
    try:
        captured = capture(call, args, kwargs)
    except TerrazzoError as e:
        verdict.worsen("skipped", f"capture: {str(e)[:120]}")
        return
    except TimeoutError:
        raise
    except Exception as e:
        verdict.worsen("crash", f"capture: {type(e).__name__}: {str(e)[:200]}")
        return
    if not captured.inputs and not captured.program.names:
        return
    try:
        results, fallbacks = LEVELS[level](captured, args, kwargs)
    except Limitation as e:
        verdict.worsen("skipped", str(e)[:200])
        return
    except TimeoutError:
        raise
    except Exception as e:
        verdict.worsen("crash", f"{type(e).__name__}: {str(e)[:300]}")
        return
    verdict.fallbacks = sorted({*verdict.fallbacks, *fallbacks})
    if fallbacks:
        verdict.worsen("fallback", ", ".join(verdict.fallbacks))
    if _is_random(op, captured):
        verdict.worsen("random")
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(expected, results, strict=True)):
            verdict.worsen("wrong", "shape or dtype of a random result")
        return
    exact = _exact(call, args, kwargs)
    if reason := difference(expected, results, exact):
        verdict.worsen("wrong", reason)


def difference(expected: list[Any], results: list[Any], exact: list[Any] | None) -> str:
    """Why our results are not as good as eager's, or nothing. Integers and bools must be equal, floats no further from float64."""
    if len(expected) != len(results):
        return f"{len(results)} results instead of {len(expected)}"
    for k, (a, b) in enumerate(zip(expected, results, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {k} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return f"result {k} differs in {(a != b).sum().item()} of {a.numel()} elements"
            continue
        reference = exact[k] if exact is not None and exact[k].shape == a.shape and exact[k].is_floating_point() else a.double()
        finite = a.isfinite() & b.isfinite()
        special = ~finite & ~_alike(a, b) & ~_alike(reference.to(a.dtype), b)
        if special.any():
            return f"result {k} has {b[special][0].item()} where eager has {a[special][0].item()}"
        a, b, reference = (torch.where(finite & reference.isfinite(), x, 0) for x in (a, b, reference))
        if not torch._dynamo.utils.same(a, b, reference, log_error=_quiet):
            worst = (b.double() - reference).abs().max().item()
            return f"result {k} is off by up to {worst:.3g}"
    return ""


def _alike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Equal, or both NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def _quiet(*args: Any, **kwargs: Any) -> None:
    """What `same` has to say is in our own message."""


def _exact(call: Callable[..., Any], args: Any, kwargs: Any) -> list[Any] | None:
    """The results in float64, where PyTorch can compute them."""
    try:
        given, named = pytree.tree_map(_raised, (args, kwargs))
        torch.manual_seed(0)
        return list(pytree.tree_leaves(call(*given, **named)))
    except Exception:
        return None


def _raised(x: Any) -> Any:
    """A float tensor, or the name of a float type, in float64."""
    if isinstance(x, torch.Tensor):
        return x.double() if x.is_floating_point() else x.clone()
    return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _is_random(op: Any, captured: Captured) -> bool:
    aten = [n for n in topological(captured.program.results) if getattr(n, "order", 0)]
    return bool(aten) or "empty" in op.name or op.name.startswith(("rand", "bernoulli", "nn.functional.dropout", "normal"))


def _tensors(captured: Captured, args: Any, kwargs: Any) -> dict[str, Any]:
    leaves = [x for x in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, torch.Tensor)]
    return {**captured.bound, **dict(zip(captured.inputs, leaves, strict=True))}


def _interpreted(captured: Captured, args: Any, kwargs: Any, last: str) -> tuple[list[Any], list[str]]:
    program: Any = captured.program
    for p, after, _ in stages(captured.program, Options(), Log()):
        program = after
        if p.name == last:
            break
    arrays = {k: to_numpy(v) for k, v in _tensors(captured, args, kwargs).items()}
    if isinstance(program, l.Program):
        out = loop_interp.run(program, arrays, call=call_numpy)
        opaque = [s.name for s in program.steps if isinstance(s, l.Call)]
    else:
        out = tensor_interp.run(program, arrays, call=call_numpy)
        opaque = [n.name for n in topological(program.results) if isinstance(n, t.Opaque)]
    return [from_numpy(x) for x in out], opaque


def _compiled(captured: Captured, args: Any, kwargs: Any) -> tuple[list[Any], list[str]]:
    from terrazzo.run.compiled import compile_program

    done = compile_program(captured.program, captured.bound, Options())
    tensors = _tensors(captured, args, kwargs)
    return done([tensors[n] for n in captured.inputs]), [f.op for f in done.fallbacks]


LEVELS: dict[str, Callable[[Captured, Any, Any], tuple[list[Any], list[str]]]] = {
    "tensor": lambda c, a, k: _interpreted(c, a, k, "torch_to_tensor"),
    "loop": lambda c, a, k: _interpreted(c, a, k, ""),
    "cpu": _compiled,
}


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(signum: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
