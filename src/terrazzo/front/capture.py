"""Capture: a module or a function, with example inputs, to Torch IR.

The call is traced once with fake tensors: in-place ops become functional, ops outside our set are taken apart by
PyTorch's own decompositions, attention by its mathematical definition (on a processor it may be an op).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from terrazzo.collector import paused
from terrazzo.errors import Limitation, TerrazzoError, UserError
from terrazzo.front import functionalized
from terrazzo.front.associative import associative_scans
from terrazzo.front.attention import attention_traced, attentions
from terrazzo.front.decompositions import resampled_whole, table
from terrazzo.front.drawn import dropouts
from terrazzo.front.effects import (
    Set,
    attributes_set,
    functional,
    not_set,
    nothing_else_changes,
    shares_memory,
    watched,
)
from terrazzo.front.fx import from_graph
from terrazzo.front.looking import checks_inside, definitions, distributions_unchecked
from terrazzo.front.recurrent import recurrent_nets_by_definition
from terrazzo.front.repeated import asked_once
from terrazzo.front.results import Result, Results, arrange, storage, view
from terrazzo.ir.program import Program
from terrazzo.ir.show import show

TENSOR = object()
"""Stands for a tensor among the arguments of a call."""
PLAIN = (type(None), bool, int, float, complex, str)
"""What a call may give back beside tensors: the same each time."""


@dataclass(frozen=True)
class Captured:
    """A program with the tensors bound to some of its inputs, and how a call becomes one of the program and back.

    `inputs` are the names of the inputs that vary from call to call, in order: those of `state`, tensors of the module
    that the call changes in place, and then the tensors among the arguments. `changed` says which of the inputs the
    call changes; their new values are the program's last results. `arguments` and `structure` are the trees that the
    arguments and the results come in, `leaves` the arguments with `TENSOR` for a tensor, and `names` what they are
    called. `numbers` are tensors of the module whose values at capture are part of the program, by name, with how often
    each had been changed then. `plain` has the results that are no tensors, by their number among all.
    """

    program: Program
    bound: Mapping[str, Any]
    inputs: tuple[str, ...]
    state: tuple[Any, ...]
    changed: tuple[int, ...]
    arguments: Any
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    results: Results | None
    structure: Any
    numbers: tuple[tuple[str, Any, int], ...] = ()
    plain: Mapping[int, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many of the program's results are the call's; the others are what it changes."""
        return int(self.structure.num_leaves) - len(self.plain)

    def whole(self, tensors: Sequence[Any]) -> Any:
        """The results of the call, of those that are tensors."""
        from torch.utils import _pytree as pytree

        left = iter(tensors)
        every = [self.plain[k] if k in self.plain else next(left) for k in range(self.structure.num_leaves)]
        return pytree.tree_unflatten(every, self.structure)

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a call, by the names of `inputs`."""
        import torch
        from torch.utils import _pytree as pytree

        tensors = [x for x in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, torch.Tensor)]
        return dict(zip(self.inputs, (*self.state, *tensors), strict=True))


@paused()
def capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    name: str = "forward",
    *,
    views: bool = False,
    called: bool = False,
) -> Captured:
    """Trace `fn(*args, **kwargs)`. Parameters and buffers of a module become bound inputs.

    Attributes that the call sets to numbers (and such) are left alone where all calls are one program with them too.
    The program's results are those of the call and then the new values of what it changes in place. With `views`, the
    results of the call are made of the program's as `results` says, so that they share memory where PyTorch's do.
    With `called`, attention may be PyTorch's op for processors.
    A call that branches on whole numbers that the module keeps as buffers is the program for their values.
    """
    numbers: Mapping[str, Any] = {}
    later: list[Set] = []
    more: list[Set] = []
    try:
        found = _capture(fn, args, kwargs, name, views, called, later)
    except _Branches as why:
        if not (numbers := whole_numbers(fn)):
            raise
        later.clear()
        try:
            found = _capture(fn, args, kwargs, name, views, called, later, numbers)
        except Limitation:
            raise why from None
    if later:  # which makes no difference if later calls, of what has these values, are the same program
        with attributes_set(later):
            again = _capture(fn, args, kwargs, name, views, called, more, numbers)
        if more or not _same(found, again):
            raise not_set(later)
    return found


class _Branches(Limitation):
    """A call branches on its data."""


def whole_numbers(fn: Any) -> dict[str, Any]:
    """The buffers of a module that hold a whole number each, or whether something holds."""
    import torch

    buffers = fn.named_buffers() if isinstance(fn, torch.nn.Module) else ()
    return {
        n: t for n, t in buffers if t.ndim == 0 and not t.is_meta and not t.is_floating_point() and not t.is_complex()
    }


def times_changed(t: Any) -> int:
    """How often a tensor was changed, as far as PyTorch counts that."""
    return -1 if t.is_inference() else t._version


def _same(a: Captured, b: Captured) -> bool:
    """Whether two calls of one function are the same program, with the same tensors bound to it."""
    if show(a.program) != show(b.program) or (a.results, a.structure, a.plain) != (b.results, b.structure, b.plain):
        return False
    return all(t is b.bound[n] or _equal_constants(t, b.bound[n]) for n, t in a.bound.items())


def _equal_constants(a: Any, b: Any) -> bool:
    import torch

    return a.device.type != "meta" and bool(torch.equal(a, b))


def _capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    name: str,
    views: bool,
    called: bool,
    later: list[Set],
    numbers: Mapping[str, Any] = MappingProxyType({}),
) -> Captured:
    """The same, where attributes that are set to plain values are noted, and buffers may be `numbers`."""
    import torch
    from torch.utils import _pytree as pytree

    module = fn if isinstance(fn, torch.nn.Module) else None
    state: dict[str, Any] = {}
    if module is not None:
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        state = {n: t for n, t in state.items() if n not in numbers}
    values = {n: (t.item(), t.dtype) for n, t in numbers.items()}
    flat, arguments = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    varying = [k for k, v in enumerate(flat) if isinstance(v, torch.Tensor)]
    structure: list[Any] = []
    plain: dict[int, Any] = {}
    known: list[Result | None] = []

    def call(tensors: list[Any]) -> list[Any]:
        constants = {n: torch.tensor(value, dtype=dtype) for n, (value, dtype) in values.items()}
        weights = {**dict(zip(state, tensors, strict=False)), **constants}
        given = (*state.values(), *(flat[k] for k in varying))
        for t in (t for t, real in zip(tensors, given, strict=True) if real.requires_grad and real.is_leaf):
            t.requires_grad_()  # a call may ask for gradients itself
        leaves = list(flat)
        for k, v in zip(varying, tensors[len(state) :], strict=True):
            leaves[k] = v
        given = pytree.tree_unflatten(leaves, arguments)
        with nothing_else_changes(module, given, later):
            out = fn(*given[0], **given[1]) if module is None else functional(module, weights, *given)
        found: list[Any]
        found, tree = pytree.tree_flatten(out)
        plain.clear()
        plain.update((k, x) for k, x in enumerate(found) if type(x) in PLAIN)
        found = [x for k, x in enumerate(found) if k not in plain]
        changes = any(torch._functionalize_has_data_mutation(t.elem) for t in tensors)
        if not all(isinstance(x, torch.Tensor) for x in found) or not (found or changes):
            kinds = sorted({type(x).__name__ for x in (*found, *plain.values()) if not isinstance(x, torch.Tensor)})
            raise UserError(
                f"the results must be tensors; found {', '.join(kinds)}. "
                "Wrap the call in a function that returns tensors"
            )
        if any(torch._functionalize_has_data_mutation(t.elem) for t in constants.values()):
            raise _Branches("the call branches on its data, and changes whole numbers of the module")
        if constants and not {x.device for x in found} <= {t.device for t in tensors}:
            raise _Branches("the call branches on its data, and returns whole numbers of the module")
        structure.append(tree)
        known[:] = [_known(k, found, tensors) for k in range(len(found))] if views else []
        return found

    tensors = [*state.values(), *(flat[k] for k in varying)]
    names = _argument_names(fn, args, kwargs or {}, len(flat))
    labels = _labels(list(state), [names[k] for k in varying])
    for label, t in zip(labels, tensors, strict=True):
        if t.layout is not torch.strided:
            raise Limitation(
                f"{label}: tensors of layout {t.layout} are not supported; torch.compile gives them to PyTorch"
            )
    gm, changed = trace(call, [t.detach() for t in tensors], called)
    _refuse_aliases(changed, tensors, labels)
    output = next(n for n in gm.graph.nodes if n.op == "output")
    count = len(output.args[0]) - len(changed)
    wanted, new = output.args[0][:count], output.args[0][count:]
    results: Results | None = None
    placed: Sequence[Any] = ()
    if views and all(isinstance(e, int) for x in wanted for e in x.meta["val"].shape):  # else it is said whose are not
        wanted, results = arrange(gm, wanted, known=known)
        placed = [*wanted, *new]
    output.args = ((*wanted, *new),)
    gm.graph.eliminate_dead_code()
    try:
        program, constants = from_graph(gm, name, placed)
    except Limitation as why:
        raise Limitation(
            f'{why}\nUnder torch.compile(..., backend="terrazzo") PyTorch runs a graph that has them.'
        ) from None
    inputs = program.input_names
    program, rename = _renamed(program, labels)
    bound = {rename[n]: t for k, (n, t) in enumerate(zip(inputs, state.values(), strict=False)) if k not in changed}
    bound.update({rename[n]: t for n, t in constants.items()})
    given = [k for k in range(len(tensors)) if k >= len(state) or k in changed]
    return Captured(
        program,
        bound,
        tuple(rename[inputs[k]] for k in given),
        tuple(tensors[k] for k in given if k < len(state)),
        tuple(given.index(k) for k in changed),
        arguments,
        tuple(TENSOR if isinstance(v, torch.Tensor) else v for v in flat),
        tuple(names),
        results,
        structure[-1],
        tuple((n, t, times_changed(t)) for n, t in numbers.items()),
        plain,
    )


def _known(number: int, results: Sequence[Any], inputs: Sequence[Any]) -> Result | None:
    """A result of a traced call as an earlier one, as an input, or as a view of one; None where it is none of them."""
    result = results[number]
    for k, r in enumerate(results[:number]):
        if result is r:
            return Result("result", k)
    for k, t in enumerate(inputs):
        if result is t:
            return Result("input", k)
        if storage(result) == storage(t):
            return Result("input", k, view(_value(result), _value(t)))
    return None


def _value(traced: Any) -> Any:
    """What a tensor of the trace holds now, after all writes to what it is a view of."""
    import torch

    torch._sync(traced)
    return torch._from_functional_tensor(traced.elem)


def _refuse_aliases(changed: Sequence[int], tensors: Sequence[Any], labels: Sequence[str]) -> None:
    """UserError where an input that is changed in place shares memory with another one."""
    for k in changed:
        for other, t in enumerate(tensors):
            if other != k and shares_memory(tensors[k], t):
                raise UserError(
                    f"{labels[k]} is changed in place and shares memory with {labels[other]}; give one of them as a "
                    'clone, or use torch.compile(..., backend="terrazzo")'
                )


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


def trace(fn: Callable[[list[Any]], list[Any]], tensors: Sequence[Any], called: bool = False) -> tuple[Any, list[int]]:
    """The functional ATen graph of `fn(tensors)`, decomposed, and which of the tensors it changes in place: their new
    values are the graph's last results. With `called`, attention may be an op.
    """
    import torch
    from torch._dynamo.convert_frame import compile_lock
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx import Interpreter
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
    from torch.fx.traceback import preserve_node_meta

    traced = partial(make_fx, tracing_mode="fake", _allow_non_fake_inputs=True)
    versions = [t._version for t in tensors]
    changed: list[int] = []
    attended = attentions(called)

    def functional(*given: Any) -> Any:
        with watched() as watch, preserve_node_meta():  # which has the line that `watch` notes
            results = fn(list(given))
        watch.refuse_writes_elsewhere()
        changed[:] = _changed(given, tensors)
        return [*results, *(given[k] for k in changed)]

    try:
        with (
            compile_lock,  # PyTorch traces in one thread at a time: who is traced is known to all its functions
            torch.no_grad(),
            attention_traced(called),
            recurrent_nets_by_definition({**definitions(), **attended, **dropouts()}),
            distributions_unchecked(),
            resampled_whole(tensors),
            checks_inside(),
            associative_scans(),
            _said_to_be_traced(),
            asked_once(),
            _use_lazy_graph_module(True),  # nobody calls what is traced, so its code is not written
        ):
            wrapped = dispatch_functionalize(functional, functionalized.mode())
            gm = traced(wrapped, decomposition_table=table())(*tensors)
            if any(_mutates(node) for node in gm.graph.nodes):  # a decomposition worked in place
                run = Interpreter(gm).run

                def again(*given: Any) -> Any:
                    results = run(*given)
                    hidden = [k for k in _changed(given, tensors) if k not in changed]
                    changed.extend(hidden)  # which the schema of an op does not say (cudnn_batch_norm, its statistics)
                    return [*results, *(given[k] for k in hidden)]

                with preserve_node_meta():  # where in the user's program each is from
                    gm = traced(dispatch_functionalize(again, functionalized.mode()))(*tensors)
    except TerrazzoError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        raise _Branches(f"{e.func} gives what depends on the data: a number that is branched on, or a shape") from None
    except GuardOnDataDependentSymNode as e:
        raise _Branches(f"the call branches on its data ({str(e).splitlines()[0]})") from None
    except Exception as e:
        if effect := re.search(r"token for effect .* the function (\S+)", str(e)):
            raise Limitation(
                f"{effect[1].rstrip('.')} checks its data and returns nothing, which no program can hold"
            ) from None
        raise UserError(f"capture failed: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}") from e
    assert [t._version for t in tensors] == versions, "tracing must not touch the inputs"
    gm.graph.eliminate_dead_code()
    return gm, changed


def _changed(given: Sequence[Any], tensors: Sequence[Any]) -> list[int]:
    """Which of the tensors a traced call changed in place; UserError where one got another shape or other memory."""
    import torch

    changed = []
    for k, (t, before) in enumerate(zip(given, tensors, strict=True)):
        value = _value(t)
        moved = torch._functionalize_has_metadata_mutation(t.elem) or torch._functionalize_was_storage_changed(t.elem)
        if moved or t.shape != before.shape or value.shape != before.shape:
            raise UserError(
                f"the call gives one of its inputs, of shape {list(before.shape)}, another shape or other memory in "
                "place (t_(), resize_(), .data = ...); return the new tensor instead, or use "
                'torch.compile(..., backend="terrazzo")'
            )
        if not torch._functionalize_has_data_mutation(t.elem):
            continue
        if value.stride() != before.stride():  # the trace went on with a tensor that has no gaps
            raise UserError(
                f"the call changes an input of shape {list(before.shape)} and strides {list(before.stride())} in "
                "place, which works for one without gaps; give a contiguous one, or use "
                'torch.compile(..., backend="terrazzo")'
            )
        changed.append(k)
    return changed


def _mutates(node: Any) -> bool:
    return node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False)


def _argument_names(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> list[str]:
    """What the leaves of the arguments are called: the parameter's name, numbered where it holds several."""
    import inspect

    from torch.utils import _pytree as pytree

    try:
        bound = inspect.signature(getattr(fn, "forward", fn)).bind(*args, **kwargs)
        named: list[str] = []
        for key, value in bound.arguments.items():
            leaves = len(pytree.tree_leaves(value))
            named += [key if leaves == 1 else f"{key}_{k}" for k in range(leaves)]
        return named if len(named) == count else [f"x_{k}" for k in range(count)]
    except (TypeError, ValueError):
        return [f"x_{k}" for k in range(count)]


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
