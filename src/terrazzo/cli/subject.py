"""What a request is about: a program, tensors for its inputs, and how PyTorch computes the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrazzo.cli.request import Request
from terrazzo.errors import UserError, about
from terrazzo.hw.gpu import GPUS, Gpu
from terrazzo.ir.places import HEAD, Places
from terrazzo.ir.program import Program
from terrazzo.progress import working

SEED = 0
"""Of random weights and inputs, so that a command prints the same thing twice."""


@dataclass(frozen=True)
class Subject:
    """`bound` are a model's weights and `inputs` what varies, by the names of the program's inputs.

    `eager` gives the results of PyTorch, `exact` the same computed in float64.
    """

    program: Any
    bound: Mapping[str, Any]
    inputs: Callable[[], Mapping[str, Any]]
    eager: Callable[[], list[Any]]
    exact: Callable[[], list[Any]]


def load(request: Request) -> Subject:
    """The subject of a request; UserError where there is no such file or model, or the code is wrong."""
    import torch

    from terrazzo.targets import target

    gpu = target(request.options.target).gpu
    if gpu is not None:
        torch.backends.cudnn.set_flags(_allow_tf32=request.options.tf32)  # who runs it, and PyTorch, look there
    if request.file is not None:
        return _from_file(*request.file, gpu or GPUS["sm_90a"], request.places[0])
    torch.manual_seed(SEED)
    if request.code is not None:
        from terrazzo.front import code

        return _captured(*code.load(request.code), request=request)
    from terrazzo.front import huggingface

    assert request.model is not None
    with working(f"loading {request.model}"):
        return _captured(*huggingface.load(request.model, **request.sizes), request=request)


def _captured(fn: Any, args: Any, kwargs: Mapping[str, Any] | None = None, *, request: Request) -> Subject:
    import torch
    from torch.utils import _pytree as pytree

    from terrazzo.front.attention import may_be_called
    from terrazzo.front.capture import capture
    from terrazzo.interp import torch as interpreter

    if (device := _device(request)) != "cpu":
        fn = fn.to(device) if isinstance(fn, torch.nn.Module) else fn
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), (tuple(args), dict(kwargs or {})))
    with working("capturing"), _quiet():
        called = may_be_called(request.options, pytree.tree_leaves((args, kwargs)))
        captured = capture(fn, args, kwargs, called=called)
    inputs = captured.given(args, kwargs or {})
    changed = [list(inputs.values())[k] for k in captured.changed]

    def eager() -> list[Any]:
        """The results, and the new values of what the call changes, which is put back."""
        before = [t.clone() for t in changed]
        with torch.no_grad():
            results = [x for x in pytree.tree_leaves(fn(*args, **(kwargs or {}))) if isinstance(x, torch.Tensor)]
            if changed:
                results = [t.clone() for t in (*results, *changed)]
            for t, value in zip(changed, before, strict=True):
                t.copy_(value)
        return results

    def exact() -> list[Any]:
        return interpreter.run(captured.program, {**captured.bound, **inputs}, precise=True)

    return Subject(captured.program, captured.bound, lambda: inputs, eager, exact)


def _device(request: Request) -> str:
    """Where a model is put: on the GPU where that is the target and one is here (to print kernels none is needed)."""
    from terrazzo.run.cuda import devices
    from terrazzo.targets import target

    return "cuda" if target(request.options.target).gpu and devices() else "cpu"


@contextmanager
def _quiet() -> Iterator[None]:
    """Shapes that do not match are our error to tell; PyTorch's tracer logs a traceback as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.disabled, before = True, logger.disabled
    try:
        yield
    finally:
        logger.disabled = before


def _from_file(kind: str, path: Path, gpu: Gpu, places: Places) -> Subject:
    from terrazzo.check.inputs import random_inputs
    from terrazzo.ir.parse import IRS
    from terrazzo.pipelines import dialect

    if kind not in IRS:
        raise UserError(f"--from {kind}: the IRs that can be read are {', '.join(IRS)}")
    program = read(path, gpu, places)
    if dialect(program) != kind:
        with about(HEAD):
            raise UserError(f"this is {dialect(program)} IR, not {kind} IR")

    def by(precise: bool) -> Callable[[], list[Any]]:
        return lambda: interpreted(program, precise)

    return Subject(program, {}, lambda: random_inputs(program), by(precise=False), by(precise=True))


def read(path: Path, gpu: Gpu | None = None, places: Places | None = None) -> Any:
    """The valid program in a file of IR text; with a `gpu`, one whose kernels stay inside of what they use there.
    `places` is filled with where everything stands.
    """
    from terrazzo.ir.dialects import kernel as k
    from terrazzo.ir.text import parse
    from terrazzo.targets.cuda.check import check

    places = Places() if places is None else places
    try:
        program = parse(path.read_text(encoding="utf-8"), str(path), places)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        before = bytes(error.object[: error.start]).decode().split("\n")
        where = f"{path}, line {len(before)}, column {len(before[-1]) + 1}"
        raise UserError(f"{where}: this is no text: {error.reason} at byte {error.start}") from None
    if isinstance(program, k.Program) and gpu:
        with places.told():
            check(program, gpu, UserError)
    return program


def interpreted(program: Any, precise: bool) -> list[Any]:
    """The results of a program by the interpreter of its IR (PyTorch, for Torch IR), on its random inputs."""
    from terrazzo.check.inputs import random_inputs
    from terrazzo.interp import kernel, loop, tensor, torch
    from terrazzo.ir.dialects import kernel as k
    from terrazzo.ir.dialects import tile

    inputs = random_inputs(program)
    if isinstance(program, Program) and program.dialect == "torch":
        return torch.run(program, inputs, precise=precise)
    arrays = {name: torch.to_numpy(value) for name, value in inputs.items()}
    if isinstance(program, k.Program):
        return [torch.from_numpy(r) for r in kernel.run(program, arrays, call=torch.call_numpy)]
    run: Any = tensor.run if isinstance(program, Program) else loop.run
    program = program.loop if isinstance(program, tile.Program) else program  # which is what it means
    return [torch.from_numpy(r) for r in run(program, arrays, precise=precise, call=torch.call_numpy)]
