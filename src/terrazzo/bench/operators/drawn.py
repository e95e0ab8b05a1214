"""Large cases of the operator database: its small samples, grown by a rule.

All dimensions of one size (and, if the operator allows it, of one place counted from the right) grow together, by twos,
the smallest first, as long as the operator still takes what comes out; this is tried on meta tensors. So the operator
itself says which dimensions belong together. A case is large enough when its largest tensor has 2^24 elements.
"""

from __future__ import annotations

import contextlib
import sys
import unittest
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from terrazzo.bench.operators.fills import Case, Fill

if "expecttest" not in sys.modules and find_spec("expecttest") is None:
    stand_in = ModuleType("expecttest")  # the database imports it for tests of PyTorch's own, which nothing here runs
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    stand_in.assert_expected_inline = None  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in
from torch.testing._internal.common_methods_invocations import UnaryUfuncInfo, op_db

RANDOM = ("rand", "bernoulli", "nn.functional.dropout", "normal")
"""How the names of operators begin whose results are random."""

LARGE = 1 << 24
"""Elements of the largest tensor of a case."""
MOST_BYTES, MOST_FLOPS = 3 << 29, 4e11
"""Of all tensors of a case in its own type; of the products in it."""
SAMPLES, PIECES = 24, 64
"""Samples of an operator that are looked at, and results that it has at most."""
FORMS = ("even", "odd", "strided", "rows", "columns", "backward")
"""Sizes that twos divide often; sizes that they do not; memory that runs along another axis (channels last, where there
are four); growth along the first axis only, or the last; the gradients of the floating-point arguments.
"""
DISTINCT = ("scatter", "index_copy", "index_put", "put", "index_fill", "masked_scatter", "select_scatter")
"""What writes to places, in no order where they are equal."""
LEFT_OUT = (
    "linalg.", "cholesky", "geqrf", "lu", "ormqr", "svd", "pca_lowrank", "triangular_solve", "logdet", "qr", "pinverse",
    "matrix_exp", "sparse", "to_sparse", "jiterator", "empty", "new_empty", "item", "equal", "is_", "allclose",
    "nonzero", "unique", "masked_select", "nn.functional.max_unpool", "norm.nuc", "nn.functional.ctc_loss", "resize",
    "argwhere", "histogramdd", "stft", "istft", "torch.ops.", "uniform", "cauchy", "exponential", "geometric",
    "log_normal", "multinomial", "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout", "unbind",
    "nn.functional.rrelu", "nn.functional.fractional", "nn.functional.dropout", "__r", "addbmm", "narrow_copy",
    "tensor_split",
)  # fmt: skip
"""Decompositions, sparse and random results, sizes that depend on data; what is another operator by another name."""
KEPT = ("linalg.norm", "linalg.vector_norm", "linalg.cross", "linalg.vecdot", "linalg.diagonal", "linalg.vander")
"""All the same."""


def name_of(op: Any) -> str:
    """The operator's name with its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def grown(op: Any, dtype: torch.dtype, form: str, most: int) -> Iterator[Case]:
    """Large cases of an operator for a type: of its first samples that grow, those that are called alike once."""
    seen: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in islice(_samples(op, dtype, form == "backward"), SAMPLES):
            if len(seen) == most:
                return
            alike = _called(sample)
            if alike not in seen and (found := _grow(op, sample, dtype, form)) is not None:
                seen.add(alike)
                yield found


def chosen(pattern: str = "") -> list[Any]:
    """The operators that make sense at a large shape, those of neural nets first."""
    found = [op for op in op_db if pattern in name_of(op)]
    found = [op for op in found if not name_of(op).startswith((*LEFT_OUT, *RANDOM)) or op.name.startswith(KEPT)]
    return sorted(found, key=lambda op: (not op.name.startswith("nn."), isinstance(op, UnaryUfuncInfo)))


def plain(op: Any) -> bool:
    """Whether an operator is a function of each element alone: one sample of it says all."""
    return isinstance(op, UnaryUfuncInfo)


def _samples(op: Any, dtype: torch.dtype, grad: bool) -> Iterator[Any]:
    with contextlib.suppress(Exception):
        torch.manual_seed(0)
        yield from op.sample_inputs("cpu", dtype, requires_grad=grad)


def _called(sample: Any) -> str:
    """What tells calls apart: ranks of tensors, and every argument that is none."""
    return str(pytree.tree_map(lambda x: x.dim() if isinstance(x, torch.Tensor) else x,
                               (sample.input, sample.args, sample.kwargs)))  # fmt: skip


def _grow(op: Any, sample: Any, dtype: torch.dtype, form: str) -> Case | None:
    leaves, spec = pytree.tree_flatten((sample.input, *sample.args, sample.kwargs))
    at = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    tensors = [leaves[k].detach() for k in at]
    if not tensors or any(x.numel() == 0 or x.layout is not torch.strided for x in tensors):
        return None

    def call(*given: torch.Tensor) -> Any:
        mine = list(leaves)
        for k, x in zip(at, given, strict=True):
            mine[k] = x
        first, *rest, named = pytree.tree_unflatten(mine, spec)
        return op.op(first, *rest, **named)

    for aligned in (True, False):
        if (sizes := _sizes(call, tensors, aligned, form)) is not None:
            break
    else:
        return None
    fills = tuple(
        _fill(x, s, sizes, tensors, form, op.name, sample, dtype) for x, s in zip(tensors, sizes, strict=True)
    )
    shapes = ", ".join(str(list(s)) for s in sizes)
    others = [x for x in pytree.tree_leaves((sample.args, sample.kwargs)) if not isinstance(x, torch.Tensor)]
    told = f"{shapes} {str(others)[:80]}" if others else shapes
    if form == "backward":
        return _backward(op, call, fills, tensors, leaves, at, told, dtype)
    return Case(name_of(op), str(dtype).removeprefix("torch."), form, told, call, fills)


def _sizes(call: Any, tensors: Sequence[torch.Tensor], aligned: bool, form: str) -> list[tuple[int, ...]] | None:
    """The sizes of the tensors, grown; None where the operator does not take anything large."""
    classes = [[(k - x.dim() if aligned else 0, s) for k, s in enumerate(x.shape)] for x in tensors]
    factor = {c: 1 for mine in classes for c in mine if c[1] > 1}
    first = max(tensors, key=lambda x: x.numel())
    if form in ("rows", "columns") and first.dim() > 1:
        ends = classes[next(k for k, x in enumerate(tensors) if x is first)]
        end = ends[0] if form == "rows" else ends[-1]
        open_ = {c for c in factor if c == end}
    else:
        open_ = set(factor)

    def shapes(more: dict[Any, int], extra: int = 0) -> list[tuple[int, ...]]:
        def size(c: Any, s: int) -> int:
            return s * more[c] + extra if more.get(c, 1) > 1 else s

        return [tuple(map(size, mine, x.shape)) for mine, x in zip(classes, tensors, strict=True)]

    current = _judged(call, tensors, shapes(factor))
    while current is not None and current < LARGE and open_:
        c = min(open_, key=lambda c: (c[1] * factor[c], c))
        more = {**factor, c: factor[c] * 2}
        after = _judged(call, tensors, shapes(more))
        if after is None or after == current:
            open_.discard(c)
        else:
            factor, current = more, after
    if current is None or current < LARGE:
        return None
    if form == "odd":
        return shapes(factor, 1) if _judged(call, tensors, shapes(factor, 1)) else None
    return shapes(factor)


def _judged(call: Any, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> int | None:
    """Elements of the largest tensor; None where the operator refuses these shapes, or they are too much."""
    given = [torch.empty(s, dtype=x.dtype, device="meta") for s, x in zip(shapes, tensors, strict=True)]
    if sum(x.numel() * x.element_size() for x in given) > MOST_BYTES:
        return None
    try:
        with FlopCounterMode(display=False) as flops:
            out = [x for x in pytree.tree_leaves(call(*given)) if isinstance(x, torch.Tensor)]
    except Exception:
        return None
    every = [*given, *out]
    if (
        not 0 < len(out) <= PIECES
        or sum(x.numel() * x.element_size() for x in every) > MOST_BYTES
        or flops.get_total_flops() > MOST_FLOPS
    ):
        return None
    return max(x.numel() for x in every)


def _fill(
    x: torch.Tensor, shape: tuple[int, ...], sizes: Sequence[tuple[int, ...]], tensors: Sequence[torch.Tensor],
    form: str, name: str, sample: Any, dtype: torch.dtype,
) -> Fill:  # fmt: skip
    """What a grown tensor is filled with: floats and numbers from where the sample has them; places up to the smallest
    dimension that they may be places in.
    """
    strided = form == "strided"
    if x.dtype is torch.bool:
        return Fill(shape, x.dtype, 0, 1, strided)
    if x.is_complex():
        return Fill(shape, x.dtype, -1.0, 1.0, strided)
    low, high = x.min().item(), x.max().item()
    if x.is_floating_point():
        finite = x[x.isfinite()]
        low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 1.0)
        return Fill(shape, x.dtype, low, high, strided)
    index = x.dtype in (torch.int64, torch.int32) and dtype is not x.dtype and low >= 0
    if not index:
        return Fill(shape, x.dtype, low, high, strided)
    places = [n for old, new in zip(tensors, sizes, strict=True) if old is not x
              for s, n in zip(old.shape, new, strict=True) if s > high]  # fmt: skip
    bound = min(places, default=int(high) + 1)
    along = None
    if name.startswith(DISTINCT) and shape:
        where = next((a for a in sample.args if isinstance(a, int)), 0) if len(shape) > 1 else 0
        along = where if shape[where] <= bound else None
    return Fill(shape, x.dtype, 0, bound - 1, strided, along)


def _backward(
    op: Any, call: Any, fills: tuple[Fill, ...], tensors: Sequence[torch.Tensor], leaves: Sequence[Any],
    at: Sequence[int], told: str, dtype: torch.dtype,
) -> Case | None:  # fmt: skip
    """The gradients of a call, given those of its results."""
    wanted = [k for k, n in enumerate(at) if leaves[n].requires_grad]
    try:
        out = [x for x in pytree.tree_leaves(call(*(f.make("meta") for f in fills))) if isinstance(x, torch.Tensor)]
    except Exception:
        return None
    own = [x for x in out if x.is_floating_point()]
    if not wanted or not own:
        return None
    count = len(fills)

    def gradients(*given: torch.Tensor) -> Any:
        with torch.enable_grad():
            mine = [x.detach().requires_grad_() if k in wanted else x for k, x in enumerate(given[:count])]
            made = [x for x in pytree.tree_leaves(call(*mine)) if isinstance(x, torch.Tensor) and x.requires_grad]
            found = torch.autograd.grad(made, [mine[k] for k in wanted], list(given[count:]), allow_unused=True)
        return [x for x in found if x is not None]

    more = tuple(Fill(tuple(x.shape), x.dtype, -1.0, 1.0) for x in own)
    return Case(name_of(op), str(dtype).removeprefix("torch."), "backward", told, gradients, (*fills, *more))
