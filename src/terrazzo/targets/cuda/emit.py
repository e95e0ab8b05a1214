"""A kernel of Kernel IR as CUDA C++, statement by statement. Nothing is decided here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import resources
from typing import Any

from terrazzo.collector import remembered
from terrazzo.errors import CompilerBug
from terrazzo.hw import functions, wgmma
from terrazzo.ir.address import flatten
from terrazzo.ir.canonical import plain
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Loaded, terms_of
from terrazzo.ir.node import Node, topological
from terrazzo.ir.ranges import Range, span, stays
from terrazzo.ir.types import DType, f32
from terrazzo.targets.cuda.alike import TEAM, alike
from terrazzo.targets.cuda.counting import counters
from terrazzo.targets.cuda.pairs import neighbours_first, pairs
from terrazzo.targets.cuda.settle import settled
from terrazzo.targets.cuda.short import Short
from terrazzo.targets.names import Names, comment, identifier, words
from terrazzo.targets.terms import (
    Scope,
    address,
    c_type,
    element,
    guard,
    index,
    literal,
    offset,
    term,
)


@lru_cache(maxsize=1)
def prelude() -> str:
    """The text every source begins with."""
    folder = resources.files("terrazzo.targets")
    return (
        (folder / "cuda" / "prelude.cuh")
        .read_text()
        .replace('#include "scalars.h"\n', (folder / "scalars.h").read_text())
    )


@remembered
def emit(kernel: k.Kernel) -> tuple[str, str]:
    """(function name, CUDA source without the prelude) of a kernel. Kernels that differ only in names of buffers have
    the same source. Kept, because whoever chooses schedules asks whether what they become was built before.
    """
    return _Writer(*alike(kernel)).source()


def gathers(kernel: k.Kernel) -> bool:
    """Whether a kernel has indices from data that may be out of range: it takes one more argument, where it notes that
    one was.
    """
    known: dict[Node, Range] = {}
    for s in k.walk(kernel.body):
        if isinstance(s, k.Let) and (found := span(s.term, known)) is not None:
            known[s.value] = found
    return any(isinstance(x, Loaded) and not stays(x.value, x.extent, known) for x in topological(kernel.body))


def _passed(kernel: k.Kernel, made: Callable[[Any], bool], read: Callable[[Any], bool]) -> set[Node]:
    """Values of terms that are `made` so, and only read by terms that `read` them so."""
    found: set[Node] = set()
    others: set[Node] = set()
    for s in k.walk(kernel.body):
        match s:
            case k.Let() if read(s.term):
                continue
            case k.Let():
                found |= {s.value} if made(s.term) else set()
                used: Any = [s.term]
            case k.If():
                used = s.inside
            case k.For() | k.Role():
                continue
            case _:
                used = s.children
        others |= set(topological([x for x in used if isinstance(x, Node)]))
    return found - others


def _rounded(kernel: k.Kernel) -> set[Node]:
    """Values of bf16 that numbers of f32 or whole numbers are rounded to and that are only converted back: they stay in
    f32, where one instruction rounds.
    """
    made = lambda x: _is(x, "bf16") and isinstance(x.args[0], l.Term) and _rounds(x.args[0].dtype)  # noqa: E731
    return _passed(kernel, made, lambda x: _is(x, "f32") and isinstance(x.args[0], k.Value))


def _inverted(kernel: k.Kernel) -> set[Node]:
    """Square roots in f32 that 1 is divided by, and nothing else reads: both are one function, without a branch."""
    return _passed(kernel, lambda x: x.dtype is f32 and _is(x, "sqrt"), _inverts)


def _is(x: Any, name: str) -> bool:
    """Whether a term is this function of others."""
    return isinstance(x, l.Apply) and x.fn.name == name


def _inverts(x: Any) -> bool:
    """Whether a term is 1 by a value."""
    if not _is(x, "div") or not isinstance(x.args[1], k.Value):
        return False
    return isinstance(x.args[0], l.Literal) and x.args[0].value == 1


EXACT = 1 << 8
"""Whole numbers up to this size, of either sign, are numbers of bf16."""


def _rounds(kind: DType) -> bool:
    """Whether numbers of a type become bf16 by way of f32."""
    return kind is f32 or kind.is_integer


def _asks(s: Node) -> l.Buffer | None:
    """The memory that a statement only loads from, to give a name to what it finds."""
    if isinstance(s, k.Move):
        return s.source
    return s.term.buffer if isinstance(s, k.Let) and isinstance(s.term, l.Load) else None


def _sends(s: Node) -> bool:
    """Whether a statement sends boxes, or waits for those that its own thread sent."""
    return isinstance(s, k.TensorLoad | k.TensorStore) or (isinstance(s, k.Commit | k.WaitGroups) and s.kind == "bulk")


class _Writer:
    def __init__(self, kernel: k.Kernel, team: str = "") -> None:
        self.kernel, self.team = kernel, team
        self.scope = Scope()
        self.maps: dict[k.Map, str] = {}
        self.unrolled: set[Node] = set()
        self.waits = settled(kernel)
        self.rounded, self.inverted = _rounded(kernel), _inverted(kernel)
        self.varying = k.varying(kernel.body, ("lane",))
        self.converged = True
        self.begins = False
        largest = max((k.shared_bytes(b) // b.type.dtype.size for b in kernel.params), default=0)
        self.short = Short(self.scope)
        self.int = self.scope.whole = "int" if largest < 1 << 31 else "i64"

    def source(self) -> tuple[str, str]:
        kernel, instructions = self.kernel, self.instructions()
        self.names = Names(words(prelude(), *instructions))
        name = "k_" + identifier(plain(kernel.name))
        params = []
        for b in kernel.params:
            self.scope.buffers[b] = formal = self.names.formal(plain(b.name))
            params.append(f"{'' if b in kernel.writes else 'const '}{c_type(b.type.dtype)}* __restrict__ {formal}")
        for n, key in enumerate(kernel.maps):
            self.maps[key] = self.names.local(f"{self.scope.buffers[key[0]].removesuffix('_p')}_map{n}")
            params.append(f"const __grid_constant__ TensorMap {self.maps[key]}")
        if gathers(kernel):
            params.append("int* bad")
        used = {x for x in topological(kernel.body) if isinstance(x, Expr)}
        lines = [comment(kernel.source)] if kernel.source else []
        lines += instructions
        bounds = f"__launch_bounds__({kernel.threads}, {kernel.resident})"
        bounds = f"__cluster_dims__({kernel.cluster}, 1, 1) {bounds}" if kernel.cluster > 1 else bounds
        lines.append(f'extern "C" __global__ void {bounds} {name}({", ".join(params)}) {{')
        if kernel.shared:
            lines.append("  extern __shared__ __align__(1024) u8 shared[];")
        for value, text in self.numbers().items():
            variables = [x for x in used if getattr(x, "name", None) == value]
            for v in variables:
                self.scope.names[v] = value
            if (variables and text) or (value == "warp" and self.statements_of(k.Role)):
                lines.append(f"  const {self.int} {value} = {text};")
        for s, at in kernel.offsets.items():
            self.scope.buffers[s] = place = self.names.local(plain(s.name))
            kind = c_type(s.type.dtype)
            lines.append(f"  {kind}* const {place} = reinterpret_cast<{kind}*>(shared + {at});")
        first = self.before_memory()
        self.begins = True
        lines += self.statements(kernel.body[:first], "  ")
        self.begins = False
        lines += ["  if (!tz_begins()) return;"] * kernel.early
        lines += self.statements(kernel.body[first:], "  ", self.asked(kernel.body[first:]))
        return name, "\n".join([*lines, "}"]) + "\n"

    def before_memory(self) -> int:
        """How many statements come before all that could touch global memory: barriers come into being."""
        early = (k.If, k.InitBarriers, k.Sync, k.ClusterSync)
        late = (n for n, s in enumerate(self.kernel.body) if not all(isinstance(x, early) for x in k.walk((s,))))
        return next(late, len(self.kernel.body))

    def asked(self, body: Sequence[Node]) -> int:
        """How many statements, at first, ask global memory for several things, behind which a fence keeps them. NVVM
        would ask for each where it is used, and ptxas moves nothing over the branch of a division: a thread would wait
        once for each of them.
        """
        if not self.kernel.early:
            return 0
        loads = 0
        for n, s in enumerate(body):
            if _asks(s) in self.kernel.reads:
                loads += 1
            elif not isinstance(s, k.Declare) or s.init:
                return n if loads > 1 else 0
        return 0

    def numbers(self) -> dict[str, str]:
        """The variables of a thread. wgmma wants descriptors that the compiler sees to be the same in all lanes."""
        warp = "threadIdx.x / 32"
        return {
            "block": "blockIdx.x",
            "warp": f"__shfl_sync(~0u, {warp}, 0)" if self.statements_of(k.MultiplyAsync) else warp,
            "lane": "threadIdx.x % 32",
            TEAM: self.team,
        }

    def statements_of(self, *kinds: type) -> list[Node]:
        """The statements of these kinds, in order."""
        return [s for s in k.walk(self.kernel.body) if isinstance(s, kinds)]

    def instructions(self) -> list[str]:
        """The functions of the instructions the kernel uses."""
        called: list[k.Function] = []
        for x in topological(self.kernel.body):
            if isinstance(x, k.Shuffle | k.Vote | k.Remote):
                called.append((x.op,))
        for s in k.walk(self.kernel.body):
            if isinstance(s, k.Statement):
                called += s.functions(self.kernel.cluster)
            elif isinstance(s, k.Role) and s.registers:
                called.append(("registers",))
        return [line for text in functions.texts(called) for line in text.rstrip().splitlines()]

    def statements(self, body: Sequence[Node], indent: str, asked: int = 0) -> list[str]:
        """The lines of a block, with a fence behind those that are `asked` for."""
        names, buffers, spans = dict(self.scope.names), dict(self.scope.buffers), dict(self.scope.spans)
        short, self.short = self.short, self.short.inner()
        with self.names.block():
            each = alternatives(body, [self.statement(s) for s in body])
            each[asked:asked] = [["tz_asked();"]] * (asked > 0)
            lines = [indent + line for found in each for line in found]
        self.short, self.scope.spans = short, spans  # what was declared ends with the braces around it
        self.scope.names, self.scope.buffers = names, buffers
        return lines

    def statement(self, s: Node) -> list[str]:
        match s:
            case k.Let():
                return [self.let(s)]
            case k.Declare():
                return self.declare(s)
            case k.DeclareInteger():
                first = index(s.value, self.scope)
                self.scope.names[s.variable] = name = self.names.local(s.variable.name)
                return [f"{self.int} {name} = {first};"]
            case k.SetInteger():
                return [f"{self.scope.names[s.variable]} = {index(s.value, self.scope)};"]
            case l.Store():
                return [f"{self.element(s.buffer, s.index)} = {term(s.value, self.scope)};"]
            case k.Statement():
                return s.cuda(self)
            case k.Role():
                last = s.first + s.count
                change = (
                    "take" if s.registers > k.REGISTER_FILE // (self.kernel.threads * self.kernel.resident) else "give"
                )
                registers = [f"  {change}_registers<{s.registers}>();"] if s.registers else []
                return [f"if (warp >= {s.first} && warp < {last}) {{", *registers, *self.statements(s.body, "  "), "}"]
            case k.For():
                self.unrolled |= {s.axis} if s.unrolled else set()
                return self.loop(s)
            case k.If():
                return self.where(s)
        raise CompilerBug(f"no CUDA for {type(s).__name__}")

    def loop(self, s: k.For) -> list[str]:
        """A loop, with what it counts along; or what its two rounds compute together."""
        if (both := pairs(s, self.term, self.element)) is not None:
            return both
        if (apart := neighbours_first(s)) is not None:
            return self.statements(apart, "")
        outer, end = dict(self.scope.names), s.axis.extent
        steps = index(end, self.scope)
        counted = [(c, index(c.first % c.base, self.scope), index(c.first // c.base, self.scope)) for c in counters(s)]
        with self.names.block(), self.diverged(self.splits(end)):
            self.scope.names[s.axis] = i = self.names.local(s.axis.name)
            head, after = [f"{i} = 0"], []
            if not isinstance(end, int):
                until = self.names.local(f"{s.axis.name}_end")
                head.append(f"{until} = {steps}")
                steps = until
            for c, rest, quotient in counted:
                name = self.names.local(f"{s.axis.name}_mod{c.base}")
                head.append(f"{name} = {rest}")
                again = [f"{name} = 0;"]
                if c.rest:
                    self.scope.names[c.rest] = name
                if c.quotient:
                    self.scope.names[c.quotient] = divided = self.names.local(f"{s.axis.name}_div{c.base}")
                    head.append(f"{divided} = {quotient}")
                    again.append(f"{divided}++;")
                after.append(f"  if (++{name} == {c.base}) {{ {' '.join(again)} }}")
            body = self.statements(s.body, "  ")
        self.scope.names = outer
        return [
            "#pragma unroll" if s.unrolled else "#pragma unroll 1",
            f"for ({self.int} {', '.join(head)}; {i} < {steps}; {i}++) {{",
            *body,
            *after,
            "}",
        ]

    def where(self, s: k.If) -> list[str]:
        """A condition. Boxes are sent by an elected lane where a warp's are together: of `lane == 0` the compiler does
        not know that it holds for one, and it writes a loop over those for which it may.
        """
        others = [e for e in s.inside if e != -k.LANE]
        apart = not self.converged or any(self.splits(e) for e in others)
        elects = len(others) < len(s.inside) and not apart and any(map(_sends, k.walk(s.body)))
        condition = [guard(others, self.scope), "elected()"] if elects else [guard(s.inside, self.scope)]
        with self.diverged(apart or len(others) < len(s.inside)):
            return [f"if ({' && '.join(filter(None, condition))}) {{", *self.statements(s.body, "  "), "}"]

    def splits(self, e: IntExpr) -> bool:
        """Whether lanes of a warp may have different values of an expression."""
        return k.depends(e, ("lane",), self.varying)

    @contextmanager
    def diverged(self, apart: bool) -> Iterator[None]:
        """While what some lanes may not do is written."""
        before, self.converged = self.converged, self.converged and not apart
        yield
        self.converged = before

    def let(self, s: k.Let) -> str:
        """A value with its term. Whole numbers that fit into 32 bits are in 32 bits."""
        rounded = isinstance(s.term, l.Apply) and (s.value in self.rounded or s.term.args[0] in self.rounded)
        name, by = self.names.local(plain(s.value.name)), tuple[Any, ...](getattr(s.term, "args", ()))
        kind = "f32" if rounded else c_type(s.value.type)
        text = self.short.text(s.term)
        if isinstance(s.term, l.Apply) and rounded:
            text = self.held(s.term.args[0]) if s.value in self.rounded else term(s.term.args[0], self.scope)
        elif s.value in self.inverted:
            text = term(by[0], self.scope)
        elif _inverts(s.term) and by[1] in self.inverted:
            text = f"tz_rsqrt({term(by[1], self.scope)})"
        elif self.short.fits(s.term):
            kind, text = "i32", text or f"(i32){term(s.term, self.scope)}"
        self.short.let(s, name)
        return f"const {kind} {name} = {text or term(s.term, self.scope)};"

    def held(self, x: Any) -> str:
        """A number rounded to bf16, in f32: a small whole number is one already."""
        given = term(x, self.scope)
        if x.dtype is f32:
            return f"tz_round_bf16({given})"
        reach = self.short.of(x)
        small = reach is not None and -EXACT <= reach[0] <= reach[1] <= EXACT
        return f"tz_cast<f32>({given})" if small else f"tz_round_bf16(tz_cast<f32>({given}))"

    def declare(self, s: k.Declare) -> list[str]:
        kind = c_type(s.place.type.dtype)
        self.scope.buffers[s.place] = name = self.names.local(plain(s.place.name))
        count = 1
        for e in s.place.type.static_shape:
            count *= e
        if not s.place.type.rank:
            return [f"{kind} {name}{f' = {literal(s.init.value, s.init.type)}' if s.init else ''};"]
        lines = [f"alignas(16) {kind} {name}[{count}];"]
        if s.init:
            lines += [
                "#pragma unroll",
                f"for (int z = 0; z < {count}; z++) {name}[z] = {literal(s.init.value, s.init.type)};",
            ]
        return lines

    # -- what the CUDA of a statement is made of -----------------------------------------------------------------------

    def name(self, place: l.Buffer) -> str:
        return self.scope.buffers[place]

    def index(self, e: IntExpr) -> str:
        return index(e, self.scope)

    def guard(self, inside: Sequence[IntExpr]) -> str:
        return guard(tuple(inside), self.scope)

    def term(self, x: Node) -> str:
        return term(x, self.scope)

    def element(self, place: l.Buffer, at: Sequence[IntExpr]) -> str:
        return element(place, at, self.scope)

    def address(self, place: l.Buffer, at: Sequence[IntExpr]) -> str:
        fixed, moving = self.apart(flatten(tuple(at), place.type.element_strides))
        if place in self.kernel.params and fixed and moving:
            return f"{self.scope.buffers[place]} + {index(moving, self.scope)} + {index(fixed, self.scope)}"
        return address(place, at, self.scope)

    def apart(self, offset: IntExpr) -> tuple[IntExpr, IntExpr]:
        """What is constant once loops are unrolled, which an access has room for itself, and the rest, which is then
        computed once.
        """
        terms = [
            (math.prod(fs, start=c), all(f.free <= self.unrolled for f in fs)) for fs, c in terms_of(offset).items()
        ]
        return sum(x for x, unrolled in terms if unrolled), sum(x for x, unrolled in terms if not unrolled)

    def shared(self, place: l.Buffer, at: Sequence[IntExpr]) -> str:
        return f"shared_address({self.address(place, at)})"

    def slab(self, place: l.Buffer, at: Sequence[IntExpr]) -> str:
        return f"shared_address({self.scope.buffers[place]} + {offset(place, at, self.scope)})"

    def descriptor(self, place: l.Buffer, at: Sequence[IntExpr], transposed: bool) -> str:
        assert isinstance(place, k.Shared)
        bits = f"{wgmma.slab(place, transposed).bits:#x}ull"
        units = flatten(tuple(at), place.type.element_strides) * place.type.dtype.size // wgmma.UNIT
        return f"slab_descriptor<{bits}>(shared_address({self.scope.buffers[place]}), {index(units, self.scope)})"

    def group(self, place: l.Buffer, at: Sequence[IntExpr], count: int) -> str:
        kind = c_type(place.type.dtype)
        return f"reinterpret_cast<{kind} (&)[{count}]>({self.element(place, at)})"

    def packed(self, place: l.Buffer, at: Sequence[IntExpr], count: int) -> str:
        return f"reinterpret_cast<const u32 (&)[{count}]>({self.element(place, at)})"

    def words(self, place: l.Buffer, at: Sequence[IntExpr], count: int) -> str:
        return f"reinterpret_cast<u32 (&)[{count}]>({self.element(place, at)})"

    def map(self, key: k.Map) -> str:
        return self.maps[key]

    def record(self, instruction: str) -> Any:
        return functions.record(instruction)

    def settled(self) -> list[str]:
        places = next(self.waits)
        return [self.scope.buffers[place] for place in places if place in self.scope.buffers]


def alternatives(body: Sequence[Node], texts: list[list[str]]) -> list[list[str]]:
    """The texts of statements, where roles of other warps that follow each other are alternatives. Behind a branch that
    some warps took ptxas does not know that those of the next one go together: it keeps what is the same for all lanes
    in ordinary registers, which attention of three warpgroups moved 33 times in a step (`R2UR`; ADR 022).
    """
    found: list[list[str]] = []
    for before, s, text in zip((None, *body), body, texts, strict=False):
        if isinstance(before, k.Role) and isinstance(s, k.Role) and s.first >= before.first + before.count:
            found[-1][-1:] = [f"}} else {text[0]}", *text[1:]]
        else:
            found.append(text)
    return found
