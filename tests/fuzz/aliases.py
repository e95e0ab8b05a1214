"""Random programs of views, writes, graph breaks and returned views; and whether they do what they do in eager: the
same values, and the same tensors sharing memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import terrazzo
from terrazzo.errors import Limitation, UserError
from terrazzo.front.dynamo import terrazzo as backend
from tests.fuzz.checks import Found, _finding, _kind

INPUTS = (
    "torch.arange(24.).reshape(4, 6)",
    "torch.arange(24.).reshape(4, 6).t()",
    "torch.arange(48.).reshape(4, 12)[:, 3:9]",
    "torch.arange(16.).reshape(4, 4)",
    "torch.arange(6.)",
    "torch.arange(8).reshape(2, 4)",
)
ALIASED = ("{}", "{}[1:]", "{}.t()", "{}.view(-1)", "{}[:, ::2]", "{}.detach()")
"""Inputs made of an earlier one."""


def _forms(text: str) -> tuple[str, ...]:
    """Statements and expressions, with holes for names."""
    return tuple(form.strip() for form in text.replace("\n", "|").split("|") if form.strip())


VIEWS = _forms("""
    {}[0] | {}[1:] | {}[..., -1] | {}[:, 1:3] | {}[::2] | {}.t() | {}.view(-1) | {}.reshape(-1) | {}.unsqueeze(0)
    {}.expand(3, *{}.shape) | {}.permute(1, 0) | {}.diagonal() | {}.unfold(0, 2, 1) | {}.split(2)[1]
    {}.chunk(2, -1)[0] | {}.unbind(0)[1] | {}.detach() | {}.narrow(0, 1, 2) | {}.flatten() | {}.squeeze(0)
    {}.contiguous() | {}.float() | {}.view_as({}) | {}.transpose(0, -1) | {}.movedim(0, -1)
    {}.as_strided((2, 2), (2, 1)) | torch.atleast_3d({}) | {}.view(2, -1) | {}.swapaxes(0, 1)
    {}.view(torch.int32) | {}.real | {}.select(0, 1) | {}.unflatten(0, (2, -1)) | {}.broadcast_to(2, *{}.shape)
    {}.ravel() | {}.data | {}.T | {}.mT | {}.to(torch.float32)
""")
VALUES = _forms("""
    {} * 2 | {} + 1 | torch.relu({}) | {}.clone() | {}.sum(0, keepdim=True) | {} @ {}.t() | {} + {}
    torch.cat([{}, {}]) | torch.zeros_like({}) | {}.softmax(-1) | {}.cumsum(0) | torch.ones(4, 6) | {}.flip(0)
    {}.mean() | torch.where({} > 3, {}, 0)
""")
WRITES = _forms("""
    {}.add_(1) | {}.mul_(2) | {}.zero_() | {}[0] = 3 | {}[..., 0] = 5 | {}.copy_({}.clone()) | {} += {}
    {}.fill_(7) | {}.t_() | {}[1:].mul_({}[1:]) | {}.clamp_(max=4) | {}.unsqueeze_(0)
    {}.index_fill_(0, torch.tensor([0]), 2) | {}.data.add_(1) | {}.detach().mul_(3) | {}.masked_fill_({} > 2, 1)
    {}.set_({}) | {}.squeeze_()
""")
BREAK = "torch._dynamo.graph_break()"


@dataclass(frozen=True)
class Case:
    """A program: what its arguments are made of, its statements, what it returns. With `grad` its floats need
    gradients; with `dynamic` it is compiled for any sizes.
    """

    inputs: tuple[str, ...]
    body: tuple[str, ...]
    returned: tuple[str, ...]
    grad: bool = False
    dynamic: bool = False

    def __str__(self) -> str:
        names = [f"x{k}" for k in range(len(self.inputs))]
        made = [f"{n} = {e}" for n, e in zip(names, self.inputs, strict=True)]
        note = f"# {'gradients' if self.grad else 'no gradients'}{', dynamic' if self.dynamic else ''}"
        return "\n".join([note, *made, "", self.function])

    @property
    def function(self) -> str:
        """The program as the text of a function."""
        names = ", ".join(f"x{k}" for k in range(len(self.inputs)))
        body = [*self.body, f"return ({''.join(r + ', ' for r in self.returned)})"]
        return f"def f({names}):\n" + "\n".join(f"    {s}" for s in body)

    def compiled(self) -> Callable[..., Any]:
        """The program as a function."""
        scope: dict[str, Any] = {"torch": torch}
        exec(self.function, scope)  # the text is our own
        return scope["f"]  # type: ignore[no-any-return]

    def arguments(self) -> tuple[list[Any], list[Any]]:
        """The arguments, and the leaves whose gradients are wanted."""
        scope: dict[str, Any] = {"torch": torch}
        leaves = []
        for k, text in enumerate(self.inputs):
            made = eval(text, scope)
            if self.grad and made.is_floating_point() and "x" not in text.replace("expand", ""):
                leaves.append(made.detach().requires_grad_())
                made = leaves[-1] if k % 2 else leaves[-1] * 1  # a leaf cannot be written to
            scope[f"x{k}"] = made
        return [scope[f"x{k}"] for k in range(len(self.inputs))], leaves


@st.composite
def cases(draw: Any, breaks: bool = True, grad: bool = True) -> Case:
    """Programs that eager runs: a statement that fails there is left out."""
    wants = grad and draw(st.booleans())
    case = Case((draw(st.sampled_from(INPUTS)),), (), (), wants)
    for _ in range(draw(st.integers(0, 2))):
        text = draw(st.sampled_from(INPUTS + ALIASED)).format(f"x{draw(st.integers(0, len(case.inputs) - 1))}")
        wider = Case((*case.inputs, text), (), (), wants)
        case = wider if _runs(wider, ()) else case
    names = [f"x{k}" for k in range(len(case.inputs))]
    body: list[str] = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(("view", "view", "value", "write", "write", *(("break",) if breaks else ()))))
        if kind == "break":
            body.append(BREAK)
            continue
        form = draw(st.sampled_from({"view": VIEWS, "value": VALUES, "write": WRITES}[kind]))
        first = draw(st.sampled_from(names[::-1]))
        text = form.format(first, first if kind == "view" else draw(st.sampled_from(names[::-1])))
        new = f"v{len(names)}"
        text = text if kind == "write" else f"{new} = {text}"
        if _runs(case, [*body, text]):
            body.append(text)
            names += [] if kind == "write" else [new]
    returned = draw(st.lists(st.sampled_from(names[::-1]), min_size=1, max_size=4))
    return Case(case.inputs, tuple(body), tuple(returned), wants, draw(st.sampled_from((False,) * 7 + (True,))))


def _runs(case: Case, body: Sequence[str]) -> bool:
    """Whether eager runs these statements."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Case(case.inputs, tuple(s for s in body if s != BREAK), ("x0",), case.grad).compiled()(*case.arguments()[0])
        except (RuntimeError, IndexError, TypeError, ValueError):
            return False
    return True


# -- what a run of a program did ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What can be seen of a call afterwards, as plain data."""

    facts: tuple[tuple[str, Any], ...]

    def differs(self, other: Seen) -> str:
        """The first fact that another run does not share; "" where there is none."""
        for (what, mine), (_, theirs) in zip(self.facts, other.facts, strict=False):
            if mine != theirs:
                return f"{what}: {mine}, in eager {theirs}"
        return "" if len(self.facts) == len(other.facts) else "the calls end differently"


def look(case: Case, call: Callable[..., Any], *, strides: bool = True) -> Seen:
    """Call, and look at everything: results, arguments, who shares memory with whom, what a write to each of them
    changes, gradients; and, if wanted, at strides.
    """
    arguments, leaves = case.arguments()
    results = list(call(*arguments))
    tensors = [*results, *arguments]
    named = [f"result {k}" for k in range(len(results))] + [f"argument {k}" for k in range(len(arguments))]
    facts: list[tuple[str, Any]] = []
    for name, t in zip(named, tensors, strict=True):
        steps = [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] if strides else []
        facts.append((name, (t.dtype, tuple(t.shape), steps, t.requires_grad, _numbers(t))))
    for k, (name, a) in enumerate(zip(named, tensors, strict=True)):
        for other, b in zip(named[:k], tensors[:k], strict=True):
            facts.append((f"{name} is {other}", a is b))
            if a.numel() and b.numel():
                facts.append((f"{name} shares storage with {other}", _storage(a) == _storage(b)))
    if case.grad:
        facts.append(("gradients", _gradients(results, leaves)))
    for k, (name, t) in enumerate(zip(named, tensors, strict=True)):
        try:
            t.detach().mul_(2).add_(k + 1)
        except RuntimeError:  # elements share places
            continue
        facts.append((f"all after a write to {name}", [_numbers(x) for x in tensors]))
    return Seen(tuple(facts))


def _gradients(results: Sequence[Any], leaves: Sequence[Any]) -> Any:
    total = [((k + 1) * r.detach().abs().add(1) * r).sum() for k, r in enumerate(results) if r.requires_grad]
    if not total or not leaves:
        return None
    try:
        found = torch.autograd.grad(sum(total), leaves, allow_unused=True)
    except RuntimeError as why:
        if "modified by an inplace operation" in str(why):
            return "refused"
        raise
    return [None if g is None else _numbers(g, 1e-3) for g in found]  # softmax's gradients cancel


@dataclass(frozen=True, eq=False)
class Numbers:
    """Values that count as the same up to rounding: `apart` of the largest of them."""

    values: tuple[float, ...]
    apart: float

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Numbers) or len(self.values) != len(other.values):
            return False
        a, b = (torch.tensor(x.values, dtype=torch.float64) for x in (self, other))
        largest = max([0.0, *(abs(v) for v in (*self.values, *other.values) if math.isfinite(v))])
        return torch.allclose(a, b, rtol=0, atol=self.apart * largest, equal_nan=True)

    def __str__(self) -> str:
        return str([float(f"{v:.4g}") for v in self.values])

    __repr__ = __str__


def _numbers(t: Any, apart: float = 2e-4) -> Numbers:
    return Numbers(tuple(t.detach().double().reshape(-1).tolist()), apart)


def _storage(t: Any) -> int:
    return int(t.untyped_storage().data_ptr())


# -- what must hold -------------------------------------------------------------------------------------------------


def under_torch_compile(case: Case) -> str:
    """`torch.compile` with our backend does what eager does, twice."""

    def check() -> str:
        if (expected := _eager(case)) is None:
            return "eager refuses"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            problem = _problem(case, expected, OURS)
        if problem and _problem(case, expected, "aot_eager"):
            return "PyTorch's own backend differs from eager too"
        if problem:
            raise Found(problem)
        return "right, partly by PyTorch" if any("terrazzo" in str(w.message) for w in said) else "right"

    return _finding(check, lambda: str(case))


def _eager(case: Case, strides: bool = True) -> Seen | None:
    """What is right; None where eager runs the statements but refuses what becomes of the results."""
    try:
        return look(case, case.compiled(), strides=strides)
    except RuntimeError:
        return None


def _problem(case: Case, expected: Seen, with_backend: Any) -> str:
    torch._dynamo.reset()
    fast = torch.compile(case.compiled(), backend=with_backend, dynamic=case.dynamic or None)
    for turn in ("first", "second"):
        try:
            difference = look(case, fast).differs(expected)
        except Exception as why:
            difference = f"{type(why).__name__}: {why}"
        if difference:
            return f"in the {turn} call {difference}"
    return ""


def OURS(gm: Any, inputs: Any) -> Any:
    """The backend with the interpreter, which needs no compiler."""
    return backend(gm, inputs, options={"target": "interpreter"})


class _Apart(TorchDispatchMode):  # type: ignore[misc]
    """Within this, what an op reads is taken before it writes, as the op's meaning says. PyTorch does so only where
    operands do not share memory in part; else it writes while it reads.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args:
            kept, *read = args
            args = (kept, *(x.clone() if isinstance(x, torch.Tensor) and x is not kept else x for x in read))
        return func(*args, **(kwargs or {}))


def under_terrazzo_compile(case: Case) -> str:
    """`terrazzo.compile` does what eager does, twice, or refuses."""

    def check() -> str:
        try:
            fast = terrazzo.compile(case.compiled(), *case.arguments()[0], options={"target": "interpreter"})
        except (UserError, Limitation) as why:
            return f"refused: {_kind(why)}"
        if (expected := _eager(case, strides=False)) is None:
            return "eager refuses"
        for turn in ("first", "second"):
            if difference := look(case, fast, strides=False).differs(expected):
                with _Apart():
                    if look(case, case.compiled(), strides=False).differs(expected):
                        return "eager reads where it writes already: its result depends on the order of its loops"
                raise Found(f"in the {turn} call {difference}")
        return "right"

    return _finding(check, lambda: str(case))
