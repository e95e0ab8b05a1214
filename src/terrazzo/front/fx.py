"""A functional ATen graph (torch.fx) to Torch IR."""

from __future__ import annotations

import re
from typing import Any

from terrazzo.errors import Limitation
from terrazzo.ir.dialects.torch import Aten, Get
from terrazzo.ir.node import Node
from terrazzo.ir.program import Input, Program
from terrazzo.ir.torch_types import from_torch, type_of
from terrazzo.ir.types import Type


def from_graph(gm: Any, name: str) -> tuple[Program, dict[str, Any]]:
    """The graph as a program, and the constant tensors it holds, by the name of the input they became."""
    import torch

    values: dict[Any, Any] = {}
    inputs: list[Input] = []
    constants: dict[str, Any] = {}
    names: dict[Node, str] = {}
    sources: dict[str, str] = {}
    taken: set[str] = set()
    order = 0
    results: tuple[Any, ...] = ()
    for node in gm.graph.nodes:
        label = _unique(_identifier(node.name), taken)
        if node.op in ("placeholder", "get_attr"):
            tensor = node.meta["val"] if node.op == "placeholder" else _attribute(gm, node.target)
            if not isinstance(tensor, torch.Tensor):
                raise Limitation(f"input {node.name} is no tensor but {type(tensor).__name__}; compile for concrete sizes")
            values[node] = Input(label, type_of(tensor))
            inputs.append(values[node])
            if node.op == "get_attr":
                constants[label] = tensor
        elif node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
            source = values[node.args[0]]
            values[node] = Get(source, node.args[1])
        elif node.op == "call_function":
            _reads_its_operand(node)
            tags = getattr(node.target, "tags", ())
            order += torch.Tag.nondeterministic_seeded in tags
            values[node] = Aten(
                str(node.target),
                tuple(_argument(a, values) for a in node.args),
                tuple((k, _argument(v, values)) for k, v in node.kwargs.items()),
                _result(node),
                order if torch.Tag.nondeterministic_seeded in tags else 0,
            )
        elif node.op == "output":
            given = node.args[0]
            results = tuple(values[r] for r in (given if isinstance(given, (tuple, list)) else (given,)))
            continue
        else:
            raise Limitation(f"the graph has a {node.op} of {node.target}, which is no ATen op")
        names.setdefault(values[node], label)
        if source_line := _source(node):
            sources.setdefault(names[values[node]], source_line)
    return Program("torch", name, tuple(inputs), results, names, sources), constants


def _argument(value: Any, values: dict[Any, Any]) -> Any:
    import torch

    if isinstance(value, torch.fx.Node):
        return values[value]
    if isinstance(value, (tuple, list)):
        return tuple(_argument(v, values) for v in value)
    return from_torch(value)


def _reads_its_operand(node: Any) -> None:
    """as_strided looks past its operand at the storage behind it. Values here have none: the two must be the same elements."""
    if not str(node.target).startswith("aten.as_strided"):
        return
    base = node.args[0].meta["val"]
    rest = dict(zip(("size", "stride", "storage_offset"), node.args[2 if "scatter" in str(node.target) else 1 :], strict=False))
    rest.update({k: v for k, v in node.kwargs.items() if k in ("size", "stride", "storage_offset")})
    offset = rest.get("storage_offset")
    last = (offset or 0) + sum((n - 1) * s for n, s in zip(rest["size"], rest["stride"], strict=True))
    inside = 0 in rest["size"] or last < base.numel()
    if not (base.is_contiguous() and inside and (offset is None or base.storage_offset() == 0)):
        raise Limitation("as_strided reads the storage behind a view, which is no value of the program")


def _result(node: Any) -> Type | tuple[Type | None, ...]:
    if "val" not in node.meta:
        raise Limitation(f"{node.target} checks its data and returns nothing, which a program cannot say")
    val = node.meta["val"]
    if isinstance(val, (tuple, list)):
        return tuple(None if v is None else _plain(v) for v in val)
    return _plain(val)


def _plain(tensor: Any) -> Type:
    """The type of a value inside the program: strides are ours to choose there."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise Limitation(f"an op returns a {type(tensor).__name__}, which Torch IR has no value for")
    found = type_of(tensor)
    return Type(found.dtype, found.shape)


def _attribute(gm: Any, path: str) -> Any:
    for part in path.split("."):
        gm = getattr(gm, part)
    return gm


def _identifier(name: str) -> str:
    name = re.sub(r"\W", "_", name)
    return name if name and not name[0].isdigit() else f"v_{name}"


RESERVED = frozenset({"inf", "nan", "get", "at", "torch", "index", "call", "kernel", "size", "None", "True", "False", "_"})


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
