"""What tracing makes of an op, kept for the next call that is alike.

Below functionalization PyTorch's decompositions and fake tensors make nodes of an op, in half a millisecond a call.
What they make depends on the op, on how its operands lie, and on its other arguments: a net of equal layers asks the
same hundred questions in each of them. The first answer is kept: nodes of operands and of each other, and how their
values lie. The program itself runs as ever, so nothing is assumed of what it does.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from threading import get_ident
from typing import Any

_ASKED = ["proxy_mode", "func", "pre_dispatch", "args", "kwargs"]
"""What PyTorch's function takes."""
_PLAIN = (int, bool, str, type(None))
"""Types of arguments that are compared with their type: 1 and True are two."""


@dataclass(frozen=True)
class _Operand:
    """Stands for the node, or the value, of a tensor among the arguments, by number."""

    number: int


@dataclass(frozen=True)
class _Made:
    """Stands for a node that the op became, by number, or for its value; of several values, for one of them."""

    number: int
    part: int | None = None


@dataclass(frozen=True)
class _Lies:
    """How a value lies: in memory of its own, or in that of another one."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: Any
    device: Any
    memory: _Operand | _Made | None


@dataclass(frozen=True)
class _Step:
    """A node: what it calls with what, how it is called, and how its value lies, or each of its values."""

    target: Any
    args: Any
    kwargs: Any
    name: str | None
    values: _Lies | tuple[_Lies, ...]
    meta: Any


@dataclass(frozen=True)
class _Answer:
    """What an op became, and its results: operands, nodes or plain values, in the list or tuple that they come in."""

    steps: tuple[_Step, ...]
    results: Any


class _Unlike(Exception):
    """A call, or what it became, holds more than is compared here: it is traced as ever."""


@contextmanager
def asked_once() -> Iterator[None]:
    """Within this, what an op that this thread traces becomes is asked once for all calls that are alike. It is for one
    thread at a time, as PyTorch's own tracing is. A PyTorch that asks in another way is left alone.
    """
    from torch.fx.experimental import proxy_tensor

    ask = getattr(proxy_tensor, "proxy_call", None)
    if ask is None or (not isinstance(ask, _Asking) and [*signature(ask).parameters] != _ASKED):
        yield
        return
    proxy_tensor.proxy_call = _Asking(ask, _Answers(), get_ident())
    try:
        yield
    finally:
        proxy_tensor.proxy_call = ask


@dataclass(frozen=True)
class _Asking:
    """What an op that a thread traces becomes by `ask`, PyTorch's own function, or as it became before."""

    ask: Callable[..., Any]
    answers: _Answers
    thread: int

    def __call__(self, mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        import torch

        answers, asked = self.answers, (mode, func, pre_dispatch, args, kwargs)
        question, operands, found = self.known(mode, func, args, kwargs)
        if found or question is None:
            return found[0] if found else self.ask(*asked)
        last = next(iter(reversed(mode.tracer.graph.nodes)), None)
        result = self.ask(*asked)
        if not answers.strange:
            try:
                with torch._C.DisableTorchFunction():
                    answers.keep(question, mode.tracer, operands, last, result)
            except Exception as why:
                answers.give_up(why)
        return result

    def known(self, mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any], tuple[Any, ...]]:
        """What is asked, None where that is not compared; its operands; and the result, if it is known."""
        import torch

        answers = self.answers
        if get_ident() != self.thread or answers.strange:
            return None, [], ()
        try:
            with torch._C.DisableTorchFunction():  # whose modes would see every look at a shape
                question, operands = answers.question(mode, func, args, kwargs)
                if question is not None and (answer := answers.known.get(question)):
                    return question, operands, (answers.again(mode.tracer, answer, operands),)
                return question, operands, ()
        except Exception as why:
            answers.give_up(why)
            return None, [], ()


def known_again(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What an op with operands below functionalization becomes in the trace of this thread, if that is known."""
    import torch
    from torch.fx.experimental import proxy_tensor

    asking = proxy_tensor.proxy_call
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return asking.known(mode, func, args, kwargs)[2] if mode is not None and isinstance(asking, _Asking) else ()


class _Answers:
    """Those of one trace, by question: who asks, the op, its arguments, and what else PyTorch goes by."""

    def __init__(self) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor

        self.known: dict[Any, _Answer] = {}
        self.fake = FakeTensor
        self.words = (torch.dtype, torch.device, torch.layout, torch.memory_format)
        self.pure: dict[Any, bool] = {}
        self.strange = False

    def give_up(self, why: Exception) -> None:
        """Ask for every call from here on: this PyTorch is not as we know it, for these are its private parts."""
        import torch

        self.strange = True
        told = f"terrazzo: capture takes longer with PyTorch {torch.__version__} ({type(why).__name__}: {why})"
        warnings.warn(told, RuntimeWarning, stacklevel=2)

    def question(self, mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """What is asked, None where it holds what is not compared; and each operand with its node's proxy."""
        import torch

        pure = self.pure.get(func)
        if pure is None:
            pure = self.pure[func] = _pure(func)
        if not pure or mode.emulate_precision_casts:
            return None, []
        operands: list[Any] = []
        tracked, numbers = mode.tracer.tensor_tracker, dict[Any, int]()

        def of(x: Any) -> Any:
            kind = type(x)
            if kind is self.fake:
                entry = tracked.get(x)
                if entry is None or entry.constant is not None or x.constant is not None:
                    raise _Unlike
                number = numbers.setdefault(entry.proxy.node, len(numbers))
                if number == len(operands):
                    operands.append((x, entry.proxy))
                elif operands[number][0] is not x:
                    raise _Unlike
                lies = (*x.shape,), x.stride(), x.storage_offset(), x.dtype, x.device
                return number, *lies, x.layout, x.requires_grad, x.is_conj(), x.is_neg(), x._is_zerotensor()
            if kind in _PLAIN:
                return kind, x
            if kind in (float, complex):
                return kind, repr(x)  # 0.0 and -0.0 are two
            if kind in (list, tuple):
                return kind, tuple([of(y) for y in x])
            if kind in self.words:
                return x
            raise _Unlike

        try:
            said = of(args), tuple([(name, of(x)) for name, x in kwargs.items()])
            about = torch.is_grad_enabled(), torch.get_default_dtype(), torch._C._len_torch_function_stack()
            also = torch._C._is_any_autocast_enabled(), torch.are_deterministic_algorithms_enabled()
            question = mode, func, *said, *about, *also
            hash(question)  # sizes that are no numbers have none
        except (_Unlike, TypeError):
            return None, []
        return (question, operands) if operands else (None, [])

    def keep(self, question: Any, tracer: Any, operands: list[Any], last: Any, found: Any) -> None:
        """Keep what an op became, the nodes after the `last` one before, where all of it can be said again."""
        nodes, node = [], last.next if last is not None else next(iter(tracer.graph.nodes))
        while node.op != "root":
            nodes.append(node)
            node = node.next
        stands: dict[Any, Any] = {proxy.node: _Operand(k) for k, (_, proxy) in enumerate(operands)}
        memory: dict[int, Any] = {_memory(t): _Operand(k) for k, (t, _) in reversed([*enumerate(operands)])}
        types = {_Operand(k): t.dtype for k, (t, _) in enumerate(operands)}
        steps = []
        try:
            for number, node in enumerate(nodes):
                steps.append(self._step(node, number, stands, memory, types, tracer.graph))
                stands[node] = _Made(number)
            results = self._results(found, tracer, operands, stands)
        except (_Unlike, KeyError):
            return
        if steps:
            self.known[question] = _Answer(tuple(steps), results)

    def _step(self, node: Any, number: int, stands: Any, memory: Any, types: Any, graph: Any) -> _Step:
        import torch

        value = node.meta.get("val")
        if node.op != "call_function" or not set(node.all_input_nodes) <= set(stands):
            raise _Unlike
        if node.target is operator.getitem and type(stands[node.args[0]]) is not _Made:
            raise _Unlike
        lie = []
        for k, x in enumerate(value if isinstance(value, (tuple, list)) else (value,)):
            if type(x) is not self.fake or x.layout is not torch.strided or x.is_conj() or x.is_neg():
                raise _Unlike
            if x.requires_grad or x.constant is not None or x._is_zerotensor():
                raise _Unlike
            here = _Made(number, k if isinstance(value, (tuple, list)) else None)
            where = memory.setdefault(_memory(x), here)
            if types.setdefault(where, x.dtype) != x.dtype:
                raise _Unlike
            own = None if where == here else where
            lie.append(_Lies((*x.shape,), x.stride(), x.storage_offset(), x.dtype, x.device, own))
        packet = getattr(node.target, "overloadpacket", None)
        name = graph._target_to_str(packet.__name__) if packet is not None else None
        args, kwargs = (torch.fx.node.map_arg(x, stands.__getitem__) for x in (node.args, node.kwargs))
        values = tuple(lie) if isinstance(value, (tuple, list)) else lie[0]
        return _Step(node.target, args, kwargs, name, values, node.meta.get("tensor_meta"))

    def _results(self, found: Any, tracer: Any, operands: list[Any], stands: Any) -> Any:
        if isinstance(found, (list, tuple)):
            parts = [self._results(x, tracer, operands, stands) for x in found]
            return parts if type(found) is list else tuple(parts)  # of those with names, too
        if type(found) is self.fake:
            same = [k for k, (t, _) in enumerate(operands) if t is found]
            entry = tracer.tensor_tracker.get(found)
            if not same and (entry is None or entry.constant is not None or found.constant is not None):
                raise _Unlike
            return _Operand(same[0]) if same else stands[entry.proxy.node]
        if found is None or type(found) in _PLAIN:
            return found
        raise _Unlike

    def again(self, tracer: Any, answer: _Answer, operands: list[Any]) -> Any:
        """What the op becomes for these operands, in the graph of the trace. A result is a tensor of its own beside the
        value of its node, as ever: of one that somebody else has too, factories of PyTorch return a view.
        """
        from torch._subclasses.fake_impls import fast_detach
        from torch.fx import traceback
        from torch.fx.experimental.proxy_tensor import _ProxyTensor

        get_replayed = getattr(traceback, "get_current_replay_node", None)
        replayed = get_replayed() if get_replayed else None  # a view, which is made again since its memory changed
        line = traceback.get_current_meta().get("stack_trace")
        line = replayed.meta.get("stack_trace", line) if replayed is not None else line
        graph = tracer.graph
        values = self._values(answer, [t for t, _ in operands])
        made: list[Any] = []

        def filled(x: Any) -> Any:
            kind = type(x)
            if kind is _Operand:
                return operands[x.number][1].node
            if kind is _Made:
                return made[x.number].node
            if isinstance(x, (list, tuple)):
                return tuple(map(filled, x)) if isinstance(x, tuple) else list(map(filled, x))
            return {k: filled(y) for k, y in x.items()} if isinstance(x, dict) else x

        for step, value in zip(answer.steps, values, strict=True):
            node = graph.create_node("call_function", step.target, filled(step.args), filled(step.kwargs), step.name)
            if line:
                node.meta["stack_trace"] = line
            node.meta["val"] = value
            if step.meta is not None:
                node.meta["tensor_meta"] = step.meta
            made.append(tracer.proxy(node))

        def result(x: Any) -> Any:
            if type(x) is _Made:
                own = fast_detach(operands[0][0].fake_mode, values[x.number])
                tracer.tensor_tracker[own] = _ProxyTensor(made[x.number], None)
                return own
            if type(x) is _Operand:
                return operands[x.number][0]
            return type(x)([result(y) for y in x]) if isinstance(x, (list, tuple)) else x

        return result(answer.results)

    def _values(self, answer: _Answer, operands: list[Any]) -> list[Any]:
        """The values of the nodes, each with memory of its own or in that of another one."""
        import torch
        from torch._dispatch.python import no_python_dispatcher
        from torch._subclasses.fake_tensor import in_kernel_invocation_manager

        aten, mode = torch.ops.aten, operands[0].fake_mode
        values: list[Any] = []

        def of(where: Any) -> Any:
            if type(where) is _Operand:
                return operands[where.number]
            return values[where.number] if where.part is None else values[where.number][where.part]

        def value(lies: _Lies) -> Any:
            with no_python_dispatcher(), in_kernel_invocation_manager(mode):
                if lies.memory is None:
                    made = torch.empty_strided(lies.shape, lies.strides, dtype=lies.dtype, device="meta")
                else:
                    made = aten.as_strided.default(of(lies.memory), lies.shape, lies.strides, lies.offset)
            return self.fake(mode, made, lies.device)

        for step in answer.steps:
            if step.target is operator.getitem:
                of_several, part = step.args
                values.append(values[of_several.number][part])
            elif isinstance(step.values, tuple):
                values.append(tuple([value(x) for x in step.values]))
            else:
                values.append(value(step.values))
        return values


def _pure(func: Any) -> bool:
    """Whether what becomes of an op goes by its arguments alone."""
    import torch

    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    data = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return not func._schema.is_mutable and not data & set(func.tags)


def _memory(t: Any) -> int:
    return int(t.untyped_storage()._cdata)
