"""PyTorch's operator database through Terrazzo: every operator, dtype and sample, judged by float64.

A *level* runs one call and returns its results: "tensor", "loop" and "kernel" by the interpreters of these IRs, "cpu"
compiled, and "torch.compile" compiled, as users get it. An operator's verdict for a dtype is the worst of its samples.
A result is right by `torch._dynamo.utils.same`, or where it is bit for bit what exact arithmetic gives when it is
rounded wherever eager rounds (eager's own error is then smaller by luck):

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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from terrazzo.bench.operators.drawn import RANDOM, name_of, op_db
from terrazzo.bench.operators.judge import difference, exactly, raised
from terrazzo.errors import Limitation, TerrazzoError
from terrazzo.front import dynamo
from terrazzo.front.capture import Captured, capture
from terrazzo.interp import kernel as kernel_interp
from terrazzo.interp import loop as loop_interp
from terrazzo.interp import tensor as tensor_interp
from terrazzo.interp.torch import call_numpy, from_numpy, to_numpy
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.node import topological
from terrazzo.options import Options
from terrazzo.pipelines import lower, lowering, stages
from terrazzo.rewrite.rule import Log
from terrazzo.run import compiled

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
        if level == "cuda":  # there eager itself gives other types, orders and signs than on the CPU
            given, named = pytree.tree_map_only(torch.Tensor, lambda t: t.cuda(), (given, named))
        expected = pytree.tree_leaves(call(*given, **named))
        expected = [x.cpu() if isinstance(x, torch.Tensor) and x.is_cuda else x for x in expected]
    except Exception as e:
        verdict.worsen("skipped", f"eager fails: {type(e).__name__}")
        return
    if not expected or not all(isinstance(x, torch.Tensor) and x.layout is torch.strided for x in expected):
        verdict.worsen("skipped", "the result is no dense tensor")
        return
    try:
        outcome = LEVELS[level](call, args, kwargs)
    except Limitation as e:
        verdict.worsen("skipped", str(e)[:200])
        return
    except TimeoutError:
        raise
    except Exception as e:
        verdict.worsen("crash", f"{type(e).__name__}: {str(e)[:300]}")
        return
    del outcome.results[len(expected) :]  # new values of what the call changes in place
    verdict.fallbacks = sorted({*verdict.fallbacks, *outcome.fallbacks})
    if outcome.fallbacks:
        verdict.worsen("fallback", ", ".join(verdict.fallbacks))
    if outcome.random or op.name.startswith(RANDOM) or "empty" in op.name:
        verdict.worsen("random")
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(expected, outcome.results, strict=True)):
            verdict.worsen("wrong", "shape or dtype of a random result")
        return
    reason = difference(expected, outcome.results, exactly(call, args, kwargs))
    if reason and not _ideal(outcome.results, call, args, kwargs):
        verdict.worsen("wrong", reason)


class _EveryOpExact(TorchDispatchMode):
    """Each ATen op is computed in float64 and rounded once, to the type PyTorch gives its result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.inplace_view in func.tags or func._schema.is_mutable or func.is_view:
            return out
        given, named = pytree.tree_map(raised, (args, kwargs or {}))
        return pytree.tree_map(
            lambda o, w: w.to(o.dtype) if isinstance(o, torch.Tensor) else o, out, func(*given, **named)
        )


def _ideal(results: list[Any], call: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether these are, bit for bit, the results of exact arithmetic rounded where eager rounds: then eager was only
    luckier.
    """
    try:
        given, named = pytree.tree_map(_copy, (args, kwargs))
        with _EveryOpExact():
            ideal = pytree.tree_leaves(call(*given, **named))
    except Exception:
        return False
    return all(torch.equal(a, b) for a, b in zip(ideal, results, strict=True))


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


@dataclass
class Outcome:
    """What a level made of one call: its results, the ops PyTorch ran for it, whether any of them was random."""

    results: list[Any]
    fallbacks: list[str]
    random: bool = False


def _captured(call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Captured, dict[str, Any], bool]:
    """The program, the tensors for its inputs, and whether it holds a random op."""
    try:
        captured = capture(call, args, kwargs)
    except TerrazzoError as e:
        raise Limitation(f"capture: {e}") from e
    leaves = [x for x in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, torch.Tensor)]
    tensors = {**captured.bound, **dict(zip(captured.inputs, leaves, strict=True))}
    return captured, tensors, any(getattr(n, "order", 0) for n in topological(captured.program.results))


def _tensor(call: Callable[..., Any], args: Any, kwargs: Any) -> Outcome:
    captured, tensors, random = _captured(call, args, kwargs)
    program: Any = stages(captured.program, Options(), Log(), ("torch_to_tensor",))[0][1]
    out = tensor_interp.run(program, {k: to_numpy(v) for k, v in tensors.items()}, call=call_numpy)
    return Outcome(
        [from_numpy(x) for x in out], [n.name for n in topological(program.results) if isinstance(n, t.Opaque)], random
    )


def _loop(call: Callable[..., Any], args: Any, kwargs: Any) -> Outcome:
    captured, tensors, random = _captured(call, args, kwargs)
    program = lower(captured.program, Options(), Log())
    out = loop_interp.run(program, {k: to_numpy(v) for k, v in tensors.items()}, call=call_numpy)
    return Outcome([from_numpy(x) for x in out], [s.name for s in program.steps if isinstance(s, l.Call)], random)


def _kernel(call: Callable[..., Any], args: Any, kwargs: Any) -> Outcome:
    """The kernels for a Hopper, simulated."""
    captured, tensors, random = _captured(call, args, kwargs)
    program = lowering(captured.program, Options(target="sm_90a", libraries="never")).at("kernel")
    out = kernel_interp.run(program, {k: to_numpy(v) for k, v in tensors.items()}, call=call_numpy)
    return Outcome([from_numpy(x) for x in out], [s.name for s in program.steps if isinstance(s, l.Call)], random)


def _cpu(call: Callable[..., Any], args: Any, kwargs: Any) -> Outcome:
    captured, tensors, random = _captured(call, args, kwargs)
    with TemporaryDirectory() as directory:
        done = compiled.compile_program(captured.program, captured.bound, Options(cache_dir=Path(directory)))
        return Outcome(done([tensors[n] for n in captured.inputs]), [f.op for f in done.fallbacks], random)


def _cuda(call: Callable[..., Any], args: Any, kwargs: Any) -> Outcome:
    """On the GPU of this machine."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.cuda(), (args, kwargs))
    captured, tensors, random = _captured(call, args, kwargs)
    with TemporaryDirectory() as directory:
        options = Options(cache_dir=Path(directory))
        done = compiled.compile_program(captured.program, captured.bound, options, "cuda:0")
        results = [x.cpu() for x in done([tensors[n] for n in captured.inputs])]
        return Outcome(results, [f.op for f in done.fallbacks], random)


def _torch_compile(call: Callable[..., Any], args: Any, kwargs: Any) -> Outcome:
    """`torch.compile(call, backend="terrazzo")`, whose graph must be the whole call."""
    seen: list[Any] = []

    def spy(program: Any, *rest: Any) -> Any:
        seen.append((program, compile_program(program, *rest)))
        return seen[-1][1]

    compile_program = compiled.compile_program
    with TemporaryDirectory() as directory, patch.object(compiled, "compile_program", spy):
        torch._dynamo.reset()
        backend = partial(dynamo.terrazzo, options={"cache_dir": directory, "strict": True})
        try:
            given, named = pytree.tree_map(_copy, (args, kwargs))
            results = pytree.tree_leaves(
                torch.compile(call, backend=backend, fullgraph=True, dynamic=False)(*given, **named)
            )
        except torch._dynamo.exc.BackendCompilerFailed as e:
            raise e.inner_exception from e
        except torch._dynamo.exc.TorchDynamoException as e:
            raise Limitation(f"torch.compile: {type(e).__name__}: {str(e).splitlines()[0]}") from e
    if not seen:
        raise Limitation("torch.compile gives the backend no graph")
    fallbacks = [f.op for _, done in seen for f in done.fallbacks]
    return Outcome(results, fallbacks, any(getattr(n, "order", 0) for p, _ in seen for n in topological(p.results)))


LEVELS: dict[str, Callable[[Callable[..., Any], Any, Any], Outcome]] = {
    "tensor": _tensor,
    "loop": _loop,
    "kernel": _kernel,
    "cpu": _cpu,
    "cuda": _cuda,
    "torch.compile": _torch_compile,
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
