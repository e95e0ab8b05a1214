"""A functional ATen graph (torch.fx) to Torch IR."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from terrazzo.errors import Limitation
from terrazzo.front.drawn import draws
from terrazzo.front.one_type import refused_on_gpus
from terrazzo.ir.dialects.torch import Aten, Get
from terrazzo.ir.node import Node
from terrazzo.ir.program import Input, Inputs, Program
from terrazzo.ir.torch_types import from_torch, type_of
from terrazzo.ir.types import Type, dense


def from_graph(
    gm: Any,
    name: str,
    placed: Collection[Any] = (),
    like: Mapping[Any, Any] = MappingProxyType({}),
    without: Collection[Any] = (),
    donated: Collection[Any] = (),
) -> tuple[Program, dict[str, Any]]:
    """The graph as a program, and the constant tensors it holds, by the name of the input they became. The values of
    nodes that are `placed` are to lie as they did when they were traced, where that has no gaps; and so are what ops
    that draw random numbers are given, since they draw them in the order of memory. Others are to lie `like` tensors.
    Some nodes, which nothing but the output may use, it is `without`. The caller has no use for what is `donated`.

    A Limitation names every op that a program cannot hold, with its source line.
    """
    reader = _Reader(gm, {*placed, *(x for n in gm.graph.nodes if draws(n) for x in n.all_input_nodes)}, like)
    for node in gm.graph.nodes:
        if node not in without:
            reader.read(node)
    if reader.refused:
        raise Unheld(reader.refused)
    inputs = Inputs(reader.inputs, (reader.values[n].name for n in donated))
    program = Program("torch", name, inputs, reader.results, reader.names, reader.sources)
    return program, reader.constants


class Unheld(Limitation):
    """A program cannot hold some operations of a graph: its `nodes`, each with the reason."""

    def __init__(self, nodes: Mapping[Any, str]) -> None:
        lines = dict.fromkeys(f"    {line}" for line in nodes.values())
        super().__init__("\n".join(["a program cannot hold these operations:", *lines]))
        self.nodes = nodes


class _Reader:
    """Reads a graph node by node."""

    def __init__(self, gm: Any, placed: Collection[Any], like: Mapping[Any, Any]) -> None:
        self.gm, self.like = gm, {n: n.meta["val"] for n in placed if "val" in n.meta} | dict(like)
        self.values: dict[Any, Any] = {}
        self.inputs: list[Input] = []
        self.constants: dict[str, Any] = {}
        self.names: dict[Node, str] = {}
        self.sources: dict[str, str] = {}
        self.results: tuple[Any, ...] = ()
        self.refused: dict[Any, str] = {}
        self._taken: set[str] = set()
        self._without_value: set[Any] = set()
        self._random_ops = 0

    def read(self, node: Any) -> None:
        """The node's value; where there can be none, why, once for all that use it."""
        import torch

        graph = node.op == "get_attr" and isinstance(attribute(self.gm, node.target), torch.nn.Module)
        calls = isinstance(node.target, torch._ops.HigherOrderOperator)  # refused for what it is, not for its graphs
        if graph or not (calls or self._without_value.isdisjoint(node.all_input_nodes)):
            self._without_value.add(node)
            return
        if node.op == "output":
            given = node.args[0]
            self.results = tuple(self.values[r] for r in (given if isinstance(given, (tuple, list)) else (given,)))
            return
        label = _unique(_identifier(node.name), self._taken)
        source = _source(node)
        try:
            value = self.values[node] = self._value(node, label)
        except Limitation as why:
            self.refused[node] = f"{node.target}{f' at {source}' if source else ''}: {why}"
            self._without_value.add(node)
            return
        self.names.setdefault(value, label)
        if source:
            self.sources.setdefault(self.names[value], source)

    def _value(self, node: Any, label: str) -> Any:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor

        if node.op in ("placeholder", "get_attr"):
            tensor = node.meta["val"] if node.op == "placeholder" else attribute(self.gm, node.target)
            if not isinstance(tensor, torch.Tensor):
                raise Limitation(f"the input is no tensor but {type(tensor).__name__}; compile for concrete sizes")
            if node.op == "get_attr" and isinstance(tensor, FakeTensor):
                raise Limitation("a trace within the call left a tensor without data, as torch.func.linearize does")
            if node.op == "get_attr" and _is_number(node, tensor):
                return Aten("aten.full.default", (tuple(tensor.shape), tensor.item()), (), _type(tensor))
            value = Input(label, type_of(tensor))
            self.inputs.append(value)
            if node.op == "get_attr":
                self.constants[label] = tensor
            return value
        if node.op != "call_function":
            raise Limitation(f"a {node.op} is no ATen op")
        if getattr(node.target, "__name__", "") == "getitem":
            found = Get(self.values[node.args[0]], node.args[1])
            if found.type is None and node.users:
                raise Limitation(f"the shape of result {node.args[1]} of {node.args[0].target} depends on the data")
            return found
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise Limitation("it runs other operators or graphs")
        _reads_its_operand(node)
        if refused_on_gpus(node.target, [getattr(a, "meta", {}).get("val") for a in node.args]):
            raise Limitation("PyTorch refuses operands of several types")
        random = draws(node)
        self._random_ops += random
        kwargs = tuple((k, _argument(v, self.values)) for k, v in node.kwargs.items() if not _stays(node, k))
        args = tuple(_argument(a, self.values) for a in node.args)
        return Aten(str(node.target), args, kwargs, self._result(node), self._random_ops if random else 0)

    def _result(self, node: Any) -> Type | tuple[Type | None, ...]:
        if "val" not in node.meta:
            raise Limitation("it checks its data and returns nothing")
        val = node.meta["val"]
        if isinstance(val, (tuple, list)):
            like = {user.args[1]: self.like[user] for user in node.users if user in self.like}
            return tuple(None if v is None else _type(v, like.get(k)) for k, v in enumerate(val))
        return _type(val, self.like.get(node))


def _argument(value: Any, values: dict[Any, Any]) -> Any:
    import torch

    if isinstance(value, torch.fx.Node):
        return values[value]
    if isinstance(value, (tuple, list)):
        return tuple(_argument(v, values) for v in value)
    return from_torch(value)


def _stays(node: Any, name: str) -> bool:
    """Whether an argument is the device that the tensor is on already, as gradients of conversions name it; or that a
    program has what it is given on, wherever that was.
    """
    import torch

    if name != "device" or node.target is not torch.ops.aten._to_copy.default:
        return False
    of, there = node.args[0], node.kwargs[name]
    if of.op in ("placeholder", "get_attr") and there.type != "cpu":
        return True
    return bool(of.meta["val"].device == there)


def _reads_its_operand(node: Any) -> None:
    """as_strided looks past its operand at the storage behind it. Values here have none: the two must be the same
    elements.
    """
    if not str(node.target).startswith("aten.as_strided"):
        return
    base = node.args[0].meta["val"]
    rest = dict(
        zip(("size", "stride", "storage_offset"), node.args[2 if "scatter" in str(node.target) else 1 :], strict=False)
    )
    rest.update({k: v for k, v in node.kwargs.items() if k in ("size", "stride", "storage_offset")})
    offset = rest.get("storage_offset")
    last = (offset or 0) + sum((n - 1) * s for n, s in zip(rest["size"], rest["stride"], strict=True))
    inside = 0 in rest["size"] or last < base.numel()
    if not (base.is_contiguous() and inside and (offset is None or base.storage_offset() == 0)):
        raise Limitation("it reads the storage behind a view, which is no value of the program")


def _type(tensor: Any, like: Any = None) -> Type:
    """The type of a value inside the program: strides are ours to choose there, unless it lies `like` something."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise Limitation(f"it returns a {type(tensor).__name__}, no tensor")
    found = type_of(tensor)
    strides = None if like is None else dense(type_of(like)).strides
    return Type(found.dtype, found.shape, strides)


def _is_number(node: Any, tensor: Any) -> bool:
    """Whether a constant of the graph is one that the program text has, as in x[..., [-2]] and torch.tensor(3.0):
    nobody can change it later.
    """
    import torch

    literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
    known = type(tensor) is torch.Tensor and tensor.device.type != "meta"
    kind = tensor.dtype is torch.int64 or tensor.is_floating_point()
    return bool(node.users) and literal and known and kind and tensor.numel() == 1


def attribute(gm: Any, path: str) -> Any:
    for part in path.split("."):
        gm = getattr(gm, part)
    return gm


def _identifier(name: str) -> str:
    name = re.sub(r"\W", "_", name)
    return name if name and not name[0].isdigit() else f"v_{name}"


RESERVED = frozenset(
    {"inf", "nan", "get", "at", "torch", "index", "call", "kernel", "size", "None", "True", "False", "_"}
)


def _unique(name: str, taken: set[str]) -> str:
    import keyword

    from terrazzo.ir.types import DTYPES

    base, k = name, 0
    while name in taken or name in RESERVED or name in DTYPES or keyword.iskeyword(name):
        k += 1
        name = f"{base}_{k}"
    taken.add(name)
    return name


def _source(node: Any) -> str:
    """`file.py:line` of the user's code, from the innermost frame outside PyTorch that the trace recorded."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    mine = [f for f in frames if "/torch/" not in f[0] and "<eval_with_key>" not in f[0]] or frames
    return f"{mine[-1][0].rsplit('/', 1)[-1]}:{mine[-1][1]}" if mine else ""
