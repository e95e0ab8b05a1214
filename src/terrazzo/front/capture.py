"""Capture: a module or a function, with example inputs, to Torch IR.

The call is traced once with fake tensors: in-place ops become functional, ops outside our set are taken apart by
PyTorch's own decompositions, attention by its mathematical definition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from terrazzo.errors import Limitation, TerrazzoError, UserError
from terrazzo.front.decompositions import table
from terrazzo.front.fx import from_graph
from terrazzo.ir.program import Program


@dataclass(frozen=True)
class Captured:
    """A program with the tensors bound to some of its inputs, and the trees its arguments and results come in.

    `inputs` are the names of the inputs that vary from call to call, in order.
    """

    program: Program
    bound: Mapping[str, Any]
    inputs: tuple[str, ...]
    arguments: Any
    results: Any


@contextmanager
def attention_by_definition() -> Iterator[None]:
    """Within this, scaled_dot_product_attention is traced as the matmuls and the softmax it is defined by."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


def capture(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, name: str = "forward"
) -> Captured:
    """Trace `fn(*args, **kwargs)`. Parameters and buffers of a module become bound inputs."""
    import torch
    from torch.utils import _pytree as pytree

    module = fn if isinstance(fn, torch.nn.Module) else None
    state: dict[str, Any] = {}
    if module is not None:
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    flat, arguments = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    varying = [k for k, v in enumerate(flat) if isinstance(v, torch.Tensor)]
    results: list[Any] = []

    def call(weights: list[Any], tensors: list[Any]) -> Any:
        leaves = list(flat)
        for k, v in zip(varying, tensors, strict=True):
            leaves[k] = v
        given, named = pytree.tree_unflatten(leaves, arguments)
        if module is None:
            out = fn(*given, **named)
        else:
            out = torch.func.functional_call(module, dict(zip(state, weights, strict=True)), given, named)
        leaves, tree = pytree.tree_flatten(out)
        if any(not isinstance(x, torch.Tensor) for x in leaves):
            kinds = sorted({type(x).__name__ for x in leaves if not isinstance(x, torch.Tensor)})
            raise UserError(
                f"the results must be tensors; found {', '.join(kinds)}. "
                "Wrap the call in a function that returns tensors"
            )
        results.append(tree)
        return leaves

    gm = trace(call, [v.detach() for v in state.values()], [flat[k].detach() for k in varying])
    try:
        program, constants = from_graph(gm, name)
    except Limitation as why:
        raise Limitation(
            f'{why}\nUnder torch.compile(..., backend="terrazzo") PyTorch runs a graph that has them.'
        ) from None
    names = program.input_names
    labels = _labels(list(state), _argument_names(fn, args, kwargs or {}, flat, varying))
    program, rename = _renamed(program, labels)
    bound = {rename[n]: t for n, t in zip(names, state.values(), strict=False)}
    bound.update({rename[n]: t for n, t in constants.items()})
    inputs = tuple(rename[n] for n in names[len(state) : len(state) + len(varying)])
    return Captured(program, bound, inputs, arguments, results[-1])


@contextmanager
def _said_to_be_traced() -> Iterator[None]:
    """Within this, torch.compiler.is_compiling() holds: libraries ask it before they branch on data."""
    import torch

    names = [n for n in ("_is_compiling_flag", "_is_exporting_flag") if hasattr(torch.compiler, n)]
    before = {n: getattr(torch.compiler, n) for n in names}
    try:
        for n in names:
            setattr(torch.compiler, n, True)
        yield
    finally:
        for n, value in before.items():
            setattr(torch.compiler, n, value)


def trace(fn: Callable[..., Any], *args: Any) -> Any:
    """The functional ATen graph of `fn(*args)`, decomposed, with dead code gone."""
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    before = [t for group in args for t in group]
    versions = [t._version for t in before]

    def functional(*groups: Any) -> Any:
        mine = [list(g) for g in groups]
        return fn(*mine)

    try:
        with torch.no_grad(), attention_by_definition(), _said_to_be_traced():
            wrapped = dispatch_functionalize(functional)
            gm = make_fx(wrapped, decomposition_table=table(), tracing_mode="fake", record_stack_traces=True)(*args)
            if any(_mutates(node) for node in gm.graph.nodes):  # a decomposition worked in place on a value of its own
                gm = make_fx(dispatch_functionalize(gm), tracing_mode="fake", record_stack_traces=True)(*args)
    except TerrazzoError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        raise Limitation(f"{e.func} gives what depends on the data: a number that is branched on, or a shape") from None
    except GuardOnDataDependentSymNode as e:
        raise Limitation(f"the call branches on its data ({str(e).splitlines()[0]})") from None
    except Exception as e:
        if effect := re.search(r"token for effect .* the function (\S+)", str(e)):
            raise Limitation(
                f"{effect[1].rstrip('.')} checks its data and returns nothing, which no program can hold"
            ) from None
        raise UserError(f"capture failed: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}") from e
    for node in gm.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("aten.copy_."):
            raise Limitation("the call changes one of its inputs in place; return the new value instead")
    assert [t._version for t in before] == versions, "tracing must not touch the inputs"
    gm.graph.eliminate_dead_code()
    return gm


def _mutates(node: Any) -> bool:
    return node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False)


def _argument_names(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], flat: list[Any], varying: list[int]
) -> list[str]:
    """What the tensors among the arguments are called: the parameter's name, numbered where it holds several."""
    import inspect

    from torch.utils import _pytree as pytree

    try:
        bound = inspect.signature(getattr(fn, "forward", fn)).bind(*args, **kwargs)
        named: list[str] = []
        for key, value in bound.arguments.items():
            count = len(pytree.tree_leaves(value))
            named += [key if count == 1 else f"{key}_{k}" for k in range(count)]
        return [named[k] for k in varying] if len(named) == len(flat) else [f"x_{k}" for k in range(len(varying))]
    except (TypeError, ValueError):
        return [f"x_{k}" for k in range(len(varying))]


def _labels(state: list[str], arguments: list[str]) -> list[str]:
    """Short names where they are unique: the last part of a parameter's path, else all of it."""
    last = [s.rsplit(".", 1)[-1] for s in state]
    return [
        short if last.count(short) == 1 and short not in arguments else full
        for short, full in zip(last, state, strict=True)
    ] + arguments


def _renamed(program: Program, labels: list[str]) -> tuple[Program, dict[str, str]]:
    """The program with its first inputs called `labels` (made identifiers and unique); also old name → new name."""
    from terrazzo.front.fx import _identifier, _unique
    from terrazzo.ir.node import Node, transform
    from terrazzo.ir.program import Input

    taken: set[str] = {n for node, n in program.names.items() if not isinstance(node, Input)}
    rename = {i.name: _unique(_identifier(label), taken) for i, label in zip(program.inputs, labels, strict=False)}
    rename.update({i.name: _unique(i.name, taken) for i in program.inputs[len(labels) :]})
    memo: dict[Node, Any] = {i: Input(rename[i.name], i.type) for i in program.inputs}
    inputs = tuple(memo[i] for i in program.inputs)
    results = tuple(transform(r, lambda n: n, memo) for r in program.results)
    names = {
        memo[n]: memo[n].name if isinstance(n, Input) else label for n, label in program.names.items() if n in memo
    }
    return Program("torch", program.name, inputs, results, names, program.sources), rename
