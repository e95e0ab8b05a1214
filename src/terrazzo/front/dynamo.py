"""`torch.compile(model, backend="terrazzo")`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from terrazzo.errors import CompilerBug, Limitation, TerrazzoError
from terrazzo.front.attention import attention_traced, attentions, may_be_called
from terrazzo.front.bags import embedding_bag
from terrazzo.front.decompositions import resampled_whole, table
from terrazzo.front.derivatives import derivatives
from terrazzo.front.devices import device_of, gather_on_one, is_copied
from terrazzo.front.drawn import drop_nothing
from terrazzo.front.fx import Unheld, from_graph
from terrazzo.front.looking import checks_inside, multilabel_margin_loss, one_hot
from terrazzo.front.partition import partition
from terrazzo.front.picked import gather_picked
from terrazzo.front.regions import inline_regions
from terrazzo.front.results import arrange, lying_alike
from terrazzo.front.scan_trees import gather_scans
from terrazzo.front.segments import in_segments, run_by_pytorch
from terrazzo.front.twice import Twice
from terrazzo.front.unfolded import unfold_by_views, windows
from terrazzo.front.written import writes
from terrazzo.front.written_out import unround_weights
from terrazzo.options import Options
from terrazzo.reproduce import failing

MANY = 3
"""Sets of sizes that a graph is compiled for before we say what to do about it."""

VALUES = 8
"""Values of its numbers (floats of Python) that a graph is compiled for: PyTorch runs it for all others."""

SHARING = ("unfold", windows.__name__, "as_strided")
"""Functions whose results may have elements that share places, other than by a stride of 0, which AOTAutograd sees."""

_graphs = count()
"""Numbers the graphs of this process, so that each is dumped beside the others."""


class _Refused(Exception):
    """What is traced is not compiled: PyTorch runs it as it was before AOTAutograd took it apart."""


def terrazzo(
    gm: Any, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, object] | None = None
) -> Any:
    """The backend. PyTorch's graph goes through AOTAutograd, so training graphs come apart into forward and backward.

    An option we do not know is an error. What we cannot compile, and a bug of ours unless the option `strict` is set,
    is told in a warning, and PyTorch runs the graph. Shapes and numbers that PyTorch holds open are compiled one by
    one, as they come.
    """
    import torch

    chosen = Options.from_mode(mode) if mode is not None else Options.from_mapping(options or {})
    if opaque := next(filter(None, map(_layout, gm.graph.find_nodes(op="placeholder"))), None):
        _say(f"tensors of layout {opaque} are not supported")
        return gm
    if gm.graph.find_nodes(op="call_method", target="set_"):
        _say("a tensor is given other memory (set_), which AOTAutograd may lose writes to")
        return gm
    if any(isinstance(x, torch.SymInt) or _symbolic(x) for x in example_inputs) or _numbers(gm):
        return _by_shape(gm, chosen)
    return _compile(gm, example_inputs, chosen)


def _compile(gm: Any, example_inputs: Sequence[Any], options: Options, static: Sequence[int] = ()) -> Any:
    """A graph compiled for its inputs, of which the `static` ones are known to be parameters and buffers."""
    import torch
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.utils import counters
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    from terrazzo.pipelines import chained_sizes
    from terrazzo.targets import target

    primals: list[Any] = []
    donated: list[int] = []
    traced = False

    def compiler(graph: Any, views: bool = True, static: Sequence[int] = ()) -> Any:
        dump = options.dump and options.dump / f"graph-{next(_graphs):03}"
        try:
            return _graph(graph, replace(options, dump=dump), views, static, primals, () if views else donated)
        except _Refused:
            if traced:  # gradients, at the first call for them: what they are of has run
                return run_by_pytorch(graph)
            raise

    def forward(graph: Any, inputs: Sequence[Any]) -> Any:
        twice.learn(graph)
        primals[:] = [n.meta.get("val") for n in graph.graph.find_nodes(op="placeholder")]
        donated[:] = _saved_for_nobody_else()
        return compiler(graph)

    def inference(graph: Any, inputs: Sequence[Any]) -> Any:
        return compiler(graph, static=_only_read(static) if options.freezing else ())

    def backward(graph: Any, inputs: Sequence[Any]) -> Any:
        """Gradients are tensors of their own."""
        return torch._dynamo.disable(compiler(graph, views=False))

    twice = Twice(gm, _warn)
    inline_regions(gm)
    drop_nothing(gm)
    called = may_be_called(options, example_inputs)
    where = _resolved(example_inputs, options)
    gpu = where is not None and bool(target(where.target).gpu)
    _define(gm, called, gpu)
    gather_picked(gm)
    gather_scans(gm)
    unfold_by_views(gm)
    trains = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in example_inputs)
    rounded = trains and gpu and unround_weights(gm, example_inputs)
    try:
        with (
            attention_traced(called),
            checks_inside(),
            resampled_whole(example_inputs),
            derivatives(),
            _gradients_apart(gm),
        ):
            compiled = aot_module_simplified(
                gm,
                example_inputs,
                fw_compiler=forward,
                bw_compiler=torch._dynamo.disable(backward),  # called, and what it made, within code that dynamo traces
                inference_compiler=inference,
                decompositions=table(),
                partition_fn=partial(partition, wide=where is not None and 4 in chained_sizes(where), exactly=rounded),
                keep_inference_input_mutations=True,
            )
            traced = True
            counters["aot_autograd"]["total"] += 1  # DDP, which splits graphs, asks whether AOTAutograd has one of them
            return twice.around(compiled)
    except _Refused:
        return gm
    except GuardOnDataDependentSymNode as why:
        _say(f"a shape depends on data ({str(why).splitlines()[0]})")
        return gm
    except (AssertionError, RuntimeError) as why:  # it does not follow every write to memory that several share
        if isinstance(why, TerrazzoError | TorchDynamoException) or not str(why).strip():
            raise
        _say(f"AOTAutograd does not take the graph ({str(why).strip().splitlines()[0]})")
        return gm


def _saved_for_nobody_else() -> list[int]:
    """Which inputs of the backward graph are tensors that autograd keeps for it alone, and that are gone when it is
    through with them. Gradients may be asked for more than once (`retain_graph=True`): AOTAutograd refuses that as long
    as it knows of such tensors, which the backward graph might overwrite; ours never does.
    """
    import torch

    context = torch._guards.TracingContext.try_get()
    if not context or not (found := getattr(context.fw_metadata, "bw_donated_idxs", None)):
        return []
    context.fw_metadata.bw_donated_idxs = []
    return list(found)


@contextmanager
def _gradients_apart(gm: Any) -> Iterator[None]:
    """Within this, AOTAutograd does not expect the gradient of a result to lie as the result does, if that may have
    elements that share places: it would copy a gradient there, where one element overwrites another.
    """
    from torch._functorch import config

    shared = any(str(getattr(n.target, "__name__", n.target)) in SHARING for n in gm.graph.nodes)
    if not shared or not hasattr(config, "guess_tangent_strides_as_outputs"):
        yield
        return
    with config.patch(guess_tangent_strides_as_outputs=False):
        yield


def _define(gm: Any, called: bool, gpu: bool) -> None:
    """Have a graph compute by definition what PyTorch would have it call, or takes apart wrongly: FlexAttention, which
    is scores, changed and masked, their softmax, and what is known of rows, traced with the rest and one kernel where
    the rules find that; attention, where it may be `called` but is not; the margins of several labels; classes as
    rows of 0 and 1; and, for a GPU, bags of rows.
    """
    import torch

    flex = importlib.import_module("torch._higher_order_ops.flex_attention")
    margins, hot = torch.nn.functional.multilabel_margin_loss, torch.nn.functional.one_hot
    meant = {flex.flex_attention: flex.math_attention, margins: multilabel_margin_loss, hot: one_hot}
    meant |= attentions(called) | ({torch.nn.functional.embedding_bag: embedding_bag} if gpu else {})
    found = [n for op in meant for n in gm.graph.find_nodes(op="call_function", target=op)]
    for node in found:
        node.target = meant[node.target]
    if found:
        gm.recompile()


def _resolved(inputs: Sequence[Any], options: Options) -> Options | None:
    """The options for the one device that tensors are on; None where there are several, or one without a record."""
    import torch

    from terrazzo.run.compiled import resolved

    devices = {str(x.device) for x in inputs if isinstance(x, torch.Tensor)}
    try:
        return resolved(options, *devices) if len(devices) == 1 else None
    except Limitation:  # a GPU there is no record of, which is told where it is compiled for
        return None


def _only_read(static: Sequence[int]) -> list[int]:
    """Which inputs of the graph that AOTAutograd compiles are parameters and buffers that it does not change: of those
    it knows, and `static`.
    """
    import torch

    context = torch._guards.TracingContext.try_get()
    meta = context.fw_metadata if context else None
    return sorted({*meta.static_input_indices, *static} - {*meta.mutated_inp_runtime_indices}) if meta else []


def _graph(
    graph: Any,
    options: Options,
    views: bool,
    static: Sequence[int] = (),
    primals: Sequence[Any] = (),
    donated: Sequence[int] = (),
) -> Any:
    """One ATen graph as a function of its inputs, of which the `static` ones are frozen, as constants of the graph are,
    where there are any. Results that are no tensors (None, numbers) are passed on. Without `views` they are the
    gradients of the `primals`. Nobody else has a use for inputs that are `donated`. What is not compiled at all, not
    even in segments, is `_Refused`, with a warning.
    """
    import torch
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.autograd import forward_ad

    from terrazzo.run.compiled import compile_program
    from terrazzo.tune.search import tune

    output = next(n for n in graph.graph.nodes if n.op == "output")
    wanted = list(output.args[0])
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    taken = [k for k, n in enumerate(placeholders) if isinstance(n.meta.get("val"), torch.Tensor)]
    try:
        gather_on_one(graph)
        with unset_fake_temporarily(), failing("compiling a graph", None):  # constants of the graph are real tensors
            written = writes(graph)
            placed = set() if views else lying_alike(wanted, primals)
            computed, results = arrange(graph, wanted, views=views, placed=placed, renewed=written)
            if not (computed or written or any(n.op == "call_function" and n.is_impure() for n in graph.graph.nodes)):
                return make_boxed_func(lambda *args: results.make(args, ()))
            device = device_of(graph)
            away = {k for k in taken if is_copied(placeholders[k], device)}
            output.args = ((*computed, *(w.new for w in written)),)
            like = {w.new: w.old.meta["val"] for w in written if w.new not in computed}
            without = {w.node for w in written}
            like_traced, ours = computed if views else placed, {placeholders[k] for k in donated}
            program, constants = from_graph(graph, "forward", like_traced, like, without, ours)
            bound = {name: t.detach() for name, t in constants.items()}
            names = dict(zip(taken, program.input_names, strict=False))
            changed = [placeholders.index(w.old) for w in written]
            if static:
                kept = (k for k in static if k in names and k not in (*changed, *away))
                options = options.bound([*(names[k] for k in kept), *bound])
            options = replace(options, updated=tuple(names[k] for k in changed))
            tune(program, options, device)
            compiled = compile_program(program, bound, options, device)
    except Limitation as why:
        output.args = (tuple(wanted),)
        refused = why.nodes if isinstance(why, Unheld) else ()
        # what one segment makes another takes as it was traced, also where nobody relies on how the last results lie
        if refused and (found := in_segments(graph, refused, lambda part: _part(part, options))):
            _warn(f"{why}\nPyTorch runs them, and what lies between is compiled")
            return found
        _say(str(why))
        raise _Refused from why
    except CompilerBug as bug:
        if options.strict:
            raise
        _say(f"A BUG OF THE COMPILER (an error with options={{'strict': True}}): {bug}\nPlease report it")
        raise _Refused from bug
    finally:
        output.args = (tuple(wanted),)
    given = tuple({r.k for r in results.each if r.of == "input"})
    as_given = not away and taken == list(range(len(placeholders)))

    def call(args: list[Any]) -> Any:
        """Empties the list, so that tensors which nobody else needs go as soon as the program is through with them."""
        if forward_ad._current_level >= 0 and _have_tangents(args):
            _say("tensors have tangents, of forward-mode differentiation")
            return run_by_pytorch(graph)(args)
        kept = {k: args[k] for k in given} if given else {}
        inputs = args
        if not as_given:
            inputs = [args[k].to(device) if k in away else args[k] for k in taken]
            args.clear()
        return results.make(kept, compiled.consume(inputs))

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _part(graph: Any, options: Options) -> Any:
    """The same of a part of a graph: what is not compiled PyTorch runs op by op."""
    try:
        return _graph(graph, options, True)
    except _Refused:
        return run_by_pytorch(graph)


def _have_tangents(args: Sequence[Any]) -> bool:
    """Whether a tensor is dual (`torch.autograd.forward_ad`): kernels would drop its tangent."""
    import torch
    from torch.autograd import forward_ad

    return any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in args)


def _by_shape(gm: Any, options: Options) -> Any:
    """A function that compiles `gm` anew for every set of concrete sizes, shapes and numbers it meets.

    It holds the lock that Dynamo compiles under: what AOTAutograd traces replaces functions of PyTorch meanwhile, and
    Dynamo, in another thread, would take these for PyTorch's own.
    """
    import torch
    from torch._dynamo.convert_frame import compile_lock

    compiled: dict[Any, Any] = {}
    numbers = _numbers(gm)
    values: set[tuple[str, ...]] = set()

    def call(*args: Any) -> Any:
        key = tuple(
            (tuple(a.shape), a.stride(), a.dtype, a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args
        )
        now = tuple(float(args[k]).hex() for k in numbers)
        key = (key, _overlaps(args), now)
        if key not in compiled:
            if now not in values and len(values) == VALUES:
                _say(f"a number of Python has another value in every call, {VALUES} of which were compiled for")
                return gm(*args)
            values.add(now)
            with compile_lock, torch._guards.tracing(None):
                if key not in compiled:  # nor has another thread compiled it meanwhile
                    compiled[key] = _specialised(gm, args, options)
            if len({sizes for sizes, *_ in compiled}) == MANY:
                _vary(key[0], next(iter(compiled))[0])
        return compiled[key](*args)

    return call


def _numbers(gm: Any) -> tuple[int, ...]:
    """Which inputs are floats of Python, that Dynamo holds open: tensors of one number, of which nothing else is asked.
    A layer's slope or eps is one under `dynamic=True`, and an argument that had another value before.
    """
    import torch

    def is_number(n: Any) -> bool:
        value = n.meta.get("example_value")
        one = isinstance(value, torch.Tensor) and value.dtype is torch.float64 and not value.dim()
        return one and bool(n.users) and all(u.op == "call_method" and u.target == "item" for u in n.users)

    return tuple(k for k, n in enumerate(gm.graph.find_nodes(op="placeholder")) if is_number(n))


def _vary(now: Sequence[Any], first: Sequence[Any]) -> None:
    """Say that sizes vary, and what to do, once in a process."""
    shapes = [(a[0], b[0]) for a, b in zip(first, now, strict=True) if isinstance(a, tuple) and a[:1] != b[:1]]
    numbers = [(a, b) for a, b in zip(first, now, strict=True) if not isinstance(a, tuple) and a != b]
    then, since = next(iter(shapes or numbers), ("one", "another"))
    _warn(
        f"sizes of the inputs vary ({then}, then {since}): a graph was compiled {MANY} times, and every new size is "
        "compiled when it comes; kernels in which it does not occur are shared. Pad inputs to a few sizes, or call "
        "once with each before time matters: what is in the cache is only loaded",
        "sizes",
    )


def _overlaps(args: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Of every tensor that shares memory with an earlier one: which that is, and where it begins."""
    import torch

    first: dict[int, int] = {}
    found = []
    for k, a in enumerate(args):
        address = a.untyped_storage().data_ptr() if isinstance(a, torch.Tensor) else 0
        earlier = first.setdefault(address, k) if address else k
        if earlier != k:
            found.append((earlier, a.storage_offset() - args[earlier].storage_offset()))
    return tuple(found)


def _specialised(gm: Any, args: Sequence[Any], options: Options) -> Any:
    """`gm` for these arguments: numbers become constants of the graph."""
    import copy

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    fixed = copy.deepcopy(gm)
    numbers = _numbers(gm)
    kept: list[Any] = []
    static: list[int] = []  # parameters and buffers, as Dynamo marks them, which a copy no longer tells AOTAutograd
    for k, (node, value) in enumerate(zip(fixed.graph.find_nodes(op="placeholder"), args, strict=True)):
        known = node.meta.get("tensor_dict", {})
        node.meta.clear()
        if k in numbers:
            for item in list(node.users):
                with fixed.graph.inserting_before(item):
                    item.replace_all_uses_with(fixed.graph.call_function(float, (float(value),)))
                fixed.graph.erase_node(item)
            fixed.graph.erase_node(node)
            continue
        if isinstance(value, torch.Tensor):
            static += [len(kept)] if known.get("_dynamo_static_input_type") else []
            kept.append(value)
            continue
        with fixed.graph.inserting_before(node):
            node.replace_all_uses_with(fixed.graph.call_function(int, (int(value),)))
        fixed.graph.erase_node(node)
    fixed.recompile()
    mode = FakeTensorMode()
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        inner = _compile(fixed, [mode.from_tensor(t, static_shapes=True) for t in kept], options, static)
    return lambda *given: inner(*(g for k, g in enumerate(given) if isinstance(g, torch.Tensor) and k not in numbers))


def _layout(placeholder: Any) -> str:
    """The layout of the tensor that a graph is traced for, where it is not dense; its fake one looks as if it were."""
    import torch

    tensor = getattr(placeholder.meta.get("grapharg"), "example", None)
    return "" if not isinstance(tensor, torch.Tensor) or tensor.layout is torch.strided else str(tensor.layout)


def _symbolic(x: Any) -> bool:
    import torch

    return isinstance(x, torch.Tensor) and any(isinstance(e, torch.SymInt) for e in (*x.shape, *x.stride()))


_said: set[str] = set()


def _say(reason: str) -> None:
    _warn(f"{reason}; PyTorch runs this graph")


def _warn(message: str, about: str = "") -> None:
    """Warn once of a message, or of what it is about."""
    import warnings

    if (about or message) not in _said:
        _said.add(about or message)
        warnings.warn(f"terrazzo: {message}", RuntimeWarning, stacklevel=3)
