"""Gradients of gradients. What AOTAutograd compiles is differentiable once: what it gives back under
`create_graph=True` is tied to some of what it depends on, or to nothing, so that second derivatives are an error, or
parts of them are missing without a word. Here PyTorch computes such gradients, from the graph that was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

from terrazzo.errors import Limitation
from terrazzo.front.drawn import draws
from terrazzo.front.written import writes

TOLD = (
    "gradients with a graph of their own (create_graph=True) of a compiled graph: PyTorch computes them, from the "
    "graph as it was traced, and runs that graph as long as such gradients are asked for. torch.func.grad within the "
    "compiled function is compiled, and so is torch.autograd.grad where torch._dynamo.config.trace_autograd_ops is True"
)


@dataclass
class Twice:
    """A graph of Dynamo's whose gradients may be asked for with a graph of their own. It is run again for them, among
    what it was compiled among (`autocast`), which Dynamo guards; and from then on PyTorch runs it at once, until
    gradients of a call are first asked for without a graph.

    `asked` is whether they were asked for with one last, `draws` is whether it draws random numbers, `changed` says
    which inputs it writes to, `reads` whether other results depend on the old values of these, which are no longer
    there.
    """

    gm: Any
    tell: Callable[[str], None]
    asked: bool = False
    draws: bool = False
    changed: frozenset[int] = frozenset()
    reads: bool = False
    autocast: tuple[tuple[str, Any, bool], ...] = field(default_factory=lambda: _autocast())

    def learn(self, forward: Any) -> None:
        """Take from the ATen graph of the forward pass what has to be known to run it again."""
        import torch

        context = torch._guards.TracingContext.try_get()
        known = context.fw_metadata.input_info if context and context.fw_metadata else []
        self.draws = any(map(draws, forward.graph.nodes))
        self.changed = frozenset(k for k, x in enumerate(known) if x.mutates_data or x.mutates_metadata)
        self.reads = bool(self.changed) and _reads_what_it_writes(forward, self.changed)

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, whose results notice when gradients with a graph of their own are asked for."""
        import torch

        again, by_pytorch = torch._dynamo.disable(self._again), torch._dynamo.disable(self._by_pytorch)
        keeps = torch._C._autograd._get_current_graph_task_keep_graph
        asked = torch.is_grad_enabled

        def notice(given: _Given, of: dict[int, int], found: Sequence[Any], tangents: Sequence[Any]) -> Any:
            """Calls nothing that Dynamo would trace, where no graph is asked for: to disable that takes longer."""
            if asked():
                return again(given, of, found, tangents)
            if not keeps():
                given.let_go()  # PyTorch lets go of what it saved, too
            return None

        notice = torch._dynamo.disable(notice, recursive=False)

        def call(*args: Any) -> Any:
            if not torch.is_grad_enabled():
                return compiled(*args)
            if self.asked:
                return by_pytorch(*args)
            given = _Given(args, self.changed, self.draws)
            before = torch.autograd._get_sequence_nr()
            results = compiled(*args)
            if node := _node([*results, *(args[k] for k in self.changed if k < len(args))], before):
                of = {r.output_nr: k for k, r in enumerate(results) if getattr(r, "grad_fn", None) is node}
                node.register_hook(partial(notice, given, of))
                if not self.changed and not self.draws:
                    node.metadata[MADE] = self, given, of, [getattr(r, "_version", 0) for r in results]
            return results

        return call

    def _again(self, given: _Given, of: dict[int, int], found: Sequence[Any], tangents: Sequence[Any]) -> Any:
        """The gradients `found` of the tangents of results, with a graph of their own. `of` says which results of the
        graph the results of the compiled function are.
        """
        import torch

        self.asked = True
        self.tell(TOLD)
        if self.reads or any(t is not None and k not in of for k, t in enumerate(tangents)):
            raise _refusal("it writes to its inputs, or its results share memory")
        inputs = given.tensors()
        edges = torch._C._current_autograd_node().next_functions
        asked = [(j, edge) for j, edge in enumerate(edges) if edge[0]]
        places = {j: k for j, edge in asked for k, x in enumerate(inputs) if given.is_at(k, x, edge)}
        if len(places) < len(asked):
            raise _refusal("inputs that it writes to, or that it holds itself, have gradients")
        # an input may depend on another, which is not to be part of its gradient here
        apart = {k: inputs[k].view_as(inputs[k]) for k in places.values()}
        with self._as_then(given):
            results = self.gm(*(apart.get(k, x.clone() if k in self.changed else x) for k, x in enumerate(inputs)))
        pairs = [(results[of[k]], t) for k, t in enumerate(tangents) if t is not None and results[of[k]].requires_grad]
        outputs, weights = zip(*pairs, strict=True)
        made = torch.autograd.grad(outputs, [*apart.values()], weights, create_graph=True, allow_unused=True)
        gradients = dict(zip(apart, made, strict=True))
        if self.draws and not all(_near(found[j], gradients[k]) for j, k in places.items()):
            raise _refusal("it draws random numbers, and others when it is run again")
        return tuple(gradients[places[j]] if j in places else x for j, x in enumerate(found))

    def _by_pytorch(self, *args: Any) -> Any:
        """The results, whose gradients PyTorch knows by itself. What is asked of them first says who runs the next."""
        import torch

        results = self.gm(*args)
        given, told = {id(x) for x in args}, False

        def notice(gradients: Any) -> None:
            nonlocal told
            if not told:
                self.asked, told = torch.is_grad_enabled(), True

        made = (r.grad_fn for r in results if isinstance(r, torch.Tensor) and id(r) not in given)
        for node in {*filter(None, made)}:
            node.register_prehook(notice)
        return results

    @contextmanager
    def _as_then(self, given: _Given) -> Iterator[None]:
        """Within this, random numbers and types are those of the call."""
        import torch

        with ExitStack() as stack:
            for device, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            if given.drawn:
                stack.enter_context(torch.random.fork_rng([d for d in given.drawn if d != "cpu"]))
                for device, state in given.drawn.items():
                    if device == "cpu":
                        torch.set_rng_state(state)
                    else:
                        torch.cuda.set_rng_state(state, device)
            yield


class _Given:
    """The arguments of a call, kept for as long as gradients may be asked for. Tensors that depend on others are kept
    as those which PyTorch saves: a tensor that is written to later, and depends on the call then, would hold itself. Of
    what another compiled graph gave only how to make it again is kept: of a model in several graphs much is added to
    something in the next one and needed no more. Of what is written to only its form is: its content is gone.
    """

    def __init__(self, args: Sequence[Any], changed: frozenset[int], drawing: bool) -> None:
        import torch

        self.kept: list[Any] = [*args]
        self.versions: list[tuple[int, int]] = []
        deep: dict[int, Any] = {}
        made: dict[int, tuple[Any, _Made]] = {}
        for k, x in enumerate(args):
            if not isinstance(x, torch.Tensor):
                continue
            if not x.is_inference():
                self.versions.append((k, x._version))
            if not x.requires_grad:
                self.kept[k] = _Form.of(x) if k in changed else x.detach()
            elif x.grad_fn is not None:
                self.kept[k] = None
                if k in changed:
                    continue
                if origin := _made(x):
                    made[k] = x, origin
                else:
                    deep[k] = x
        self.saved = _functions()[0].apply(*deep.values()) if deep else None
        self.deep = tuple(deep)
        self.changed = changed
        self.made = {k: origin for k, (_, origin) in made.items()}
        hollow = _functions()[1].apply(*(x for x, _ in made.values())) if made else ()
        self.hollow = dict(zip(made, hollow, strict=True))
        self.readers, self.over = 0, False
        self.drawn: dict[Any, Any] = {}
        if drawing:
            self.drawn["cpu"] = torch.get_rng_state()
            for device in {x.device for x in args if isinstance(x, torch.Tensor) and x.is_cuda}:
                self.drawn[device] = torch.cuda.get_rng_state(device)

    def let_go(self) -> None:
        """Keep nothing any more, once nobody needs it to make an argument of another call again."""
        self.over = True
        if not self.readers and self.kept:
            self.kept, self.saved, self.hollow = [], None, {}
            for origin in self.made.values():
                origin.given.readers -= 1
                if origin.given.over:
                    origin.given.let_go()

    def tensors(self) -> list[Any]:
        """The arguments, with what they depend on. RuntimeError, as PyTorch's, if they were written to since."""
        if not self.kept:
            raise RuntimeError("a compiled graph is gone backward through a second time: specify retain_graph=True")
        for k, origin in self.made.items():
            if self.kept[k] is None:
                self.kept[k] = _functions()[2].apply(self.hollow[k], [origin.again()])
        found = [*self.kept]
        deep = () if self.saved is None else self.saved.grad_fn.saved_tensors
        for k, x in zip(self.deep, deep, strict=True):
            found[k] = x
        same = (*self.changed, *self.made)
        if any(found[k]._version != v for k, v in self.versions if k not in same):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                "input of a compiled graph, whose gradient was asked for with create_graph=True"
            )
        return found

    def is_at(self, k: int, x: Any, edge: tuple[Any, int]) -> bool:
        """Whether gradients of an argument, which is x now, go along an edge."""
        if k in self.made:
            edges = self.hollow[k].grad_fn.next_functions
            return bool(edges[[*self.made].index(k)] == edge)
        return _is_at(x, edge)


MADE = "terrazzo: what made this"


class _Made(NamedTuple):
    """A result of a compiled graph that nothing was written to since, or a view of it: which `result` of the call it
    was that this was `given`, and how both lie.
    """

    twice: Twice
    given: _Given
    result: int
    whole: _Form
    view: _Form

    def again(self) -> Any:
        """The same tensor, which depends on nothing."""
        import torch

        given = self.given.tensors()  # which stay there, with what they depend on
        with torch.no_grad(), self.twice._as_then(self.given):
            results = self.twice.gm(*given)
            whole = self.whole.clone().copy_(results[self.result])
            return whole.as_strided(self.view.size, self.view.strides, self.view.offset - self.whole.offset)


def _made(x: Any) -> _Made | None:
    """How a tensor that depends on others is made again; None where only who has it knows it."""
    import torch

    for base in (x, x._base):
        if not type(x) is type(base) is torch.Tensor or base.grad_fn is None:
            continue
        if base.dtype is not x.dtype or x.is_conj() or x.is_neg() or 0 in base.stride():
            continue
        twice, given, of, versions = base.grad_fn.metadata.get(MADE, (None, None, {}, ()))
        k = of.get(base.output_nr)
        if k is not None and given.kept and x._version == versions[k]:
            given.readers += 1
            form = _Form.of(x)
            return _Made(twice, given, k, form if base is x else _Form.of(base), form)
    return None


class _Form(NamedTuple):
    """What a tensor is beside its content, and how far behind the beginning of its memory it begins."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: Any
    device: Any

    @classmethod
    def of(cls, x: Any) -> _Form:
        """That of a tensor."""
        return cls(tuple(x.size()), tuple(x.stride()), x.storage_offset(), x.dtype, x.device)

    def clone(self) -> Any:
        """A tensor of this form."""
        import torch

        return torch.empty_strided(self.size, self.strides, dtype=self.dtype, device=self.device)


@cache
def _functions() -> tuple[Any, Any, Any]:
    """Functions of PyTorch's, made once PyTorch is there: one that saves what it is given; one whose results take no
    memory, and depend on what it is given as that does; and one that fills such a result with a tensor.
    """
    import torch

    class Saving(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            return torch.empty(0)

    class Hollow(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            return tuple(x.new_empty_strided(x.shape, (0,) * x.dim()) for x in tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients

    class Filled(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, hollow: Any, content: list[Any]) -> Any:
            return content[0]

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient, None

    return Saving, Hollow, Filled


def _node(tensors: Sequence[Any], before: int) -> Any:
    """The node of a compiled function that tensors depend on, of those made since the sequence number `before`."""
    open_ = [f for t in tensors if (f := getattr(t, "grad_fn", None))]
    seen = set()
    while open_:
        node = open_.pop(0)
        if node in seen or node._sequence_nr() < before:
            continue
        if type(node).__name__ == "CompiledFunctionBackward":
            return node
        seen.add(node)
        open_ += [f for f, _ in node.next_functions if f]
    return None


def _is_at(x: Any, edge: tuple[Any, int]) -> bool:
    """Whether gradients of a tensor go along an edge."""
    node, place = edge
    if getattr(x, "grad_fn", None) is None:
        return x is not None and getattr(node, "variable", None) is x
    return x.grad_fn is node and x.output_nr == place


def _near(one: Any, other: Any) -> bool:
    """Whether gradients are the same but for rounding: other random numbers make others, most of them by far."""
    if one is None or other is None:
        return (one is other) or not (one if other is None else other).any()
    one, other = one.detach().double(), other.detach().double()
    return bool((one - other).norm() <= 0.1 * other.norm() + 1e-30)


def _reads_what_it_writes(forward: Any, changed: frozenset[int]) -> bool:
    """Whether results of an ATen graph depend on inputs that it writes to, the new values of these aside."""
    (output,) = forward.graph.find_nodes(op="output")
    placeholders = forward.graph.find_nodes(op="placeholder")
    try:
        written = writes(forward)
    except Limitation:
        return True
    if {w.old for w in written} != {placeholders[k] for k in changed}:
        return True
    reached = {w.old for w in written}
    for node in forward.graph.nodes:
        if any(x in reached for x in node.all_input_nodes):
            reached.add(node)
    return any(x in reached for x in output.all_input_nodes if all(x not in (w.new, w.node) for w in written))


def _autocast() -> tuple[tuple[str, Any, bool], ...]:
    import torch

    return tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in ("cpu", "cuda"))


def _refusal(why: str) -> Limitation:
    return Limitation(
        f"gradients with a graph of their own (create_graph=True) of a compiled graph: {why}. Compute the inner "
        "gradient within the compiled function by torch.func.grad, or leave the function out by torch.compiler.disable"
    )
