"""A kernel of Kernel IR as CUDA C++, statement by statement. Nothing is decided here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import resources

from terrazzo.errors import CompilerBug
from terrazzo.hw import ldmatrix, mma_sync, tma
from terrazzo.hw.transfer import CP_ASYNC, SHUFFLE, WIDE
from terrazzo.ir.address import flatten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Loaded, terms_of
from terrazzo.ir.node import Node, topological
from terrazzo.targets.terms import Scope, c_type, expression, guard, identifier, index, literal, term


@lru_cache(maxsize=1)
def prelude() -> str:
    """The text every source begins with."""
    folder = resources.files("terrazzo.targets")
    return (folder / "cuda" / "prelude.cuh").read_text().replace('#include "scalars.h"\n', (folder / "scalars.h").read_text())


def emit(kernel: k.Kernel) -> tuple[str, str]:
    """(function name, CUDA source without the prelude) of a kernel. Kernels that differ only in names of buffers have the same source."""
    return _Writer(kernel).source()


def gathers(kernel: k.Kernel) -> bool:
    """Whether a kernel has indices from data: it takes one more argument, where it notes that one was out of range."""
    return any(isinstance(x, Loaded) for x in topological(kernel.body))


class _Writer:
    def __init__(self, kernel: k.Kernel) -> None:
        self.kernel = kernel
        self.scope = Scope()
        self.maps: dict[tuple[l.Buffer, tuple[int, ...], int], str] = {}
        self.unrolled: set[Node] = set()
        largest = max((k.shared_bytes(b) // b.type.dtype.size for b in kernel.params), default=0)
        self.int = "int" if largest < 1 << 31 else "i64"

    def source(self) -> tuple[str, str]:
        kernel = self.kernel
        name = "k_" + identifier(kernel.name)
        taken: set[str] = set()
        params = []
        for b in kernel.params:
            formal = identifier(b.name) + "_p"
            while formal in taken:
                formal += "_"
            taken.add(formal)
            self.scope.buffers[b] = formal
            params.append(f"{'' if b in kernel.writes else 'const '}{c_type(b.type.dtype)}* __restrict__ {formal}")
        for n, key in enumerate(kernel.maps):
            self.maps[key] = f"{self.scope.buffers[key[0]].removesuffix('_p')}_map{n}"
            params.append(f"const __grid_constant__ TensorMap {self.maps[key]}")
        if gathers(kernel):
            params.append("int* bad")
        used = {x for x in topological(kernel.body) if isinstance(x, Expr)}
        lines = [f"// {kernel.source}"] if kernel.source else []
        lines += self.instructions()
        lines.append(f'extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.resident}) {name}({", ".join(params)}) {{')
        if kernel.shared:
            lines.append("  extern __shared__ __align__(1024) u8 shared[];")
        for value in ("block", "warp", "lane"):
            text = {"block": "blockIdx.x", "warp": "threadIdx.x / 32", "lane": "threadIdx.x % 32"}[value]
            variables = [x for x in used if getattr(x, "name", None) == value]
            for v in variables:
                self.scope.names[v] = value
            if variables:
                lines.append(f"  const {self.int} {value} = {text};")
        for s, at in kernel.offsets.items():
            self.scope.buffers[s] = s.name
            lines.append(f"  {c_type(s.type.dtype)}* const {s.name} = reinterpret_cast<{c_type(s.type.dtype)}*>(shared + {at});")
        lines += self.statements(kernel.body, "  ")
        return name, "\n".join([*lines, "}"]) + "\n"

    def instructions(self) -> list[str]:
        """The functions of the instructions the kernel uses."""
        names = {s.instruction: None for s in k.walk(self.kernel.body) if isinstance(s, k.LoadMatrix | k.Multiply)}
        products = {s.instruction for s in k.walk(self.kernel.body) if isinstance(s, k.Multiply)}
        kinds = {type(x) for x in topological(self.kernel.body)}
        lanes = [r.cuda for kind, r in ((k.Move, WIDE), (k.Shuffle, SHUFFLE), (k.AsyncCopy, CP_ASYNC)) if kind in kinds]
        ranks = sorted({len(box) for _, box, _ in self.kernel.maps})
        tensors = [*([tma.BARRIERS] if ranks else []), *map(tma.load_function, ranks)]
        texts = lanes + tensors + [mma_sync.product(name).cuda() if name in products else ldmatrix.move(name).cuda() for name in names]
        return [line for text in texts for line in text.rstrip().splitlines()]

    def statements(self, body: Iterable[Node], indent: str) -> list[str]:
        return [indent + line for s in body for line in self.statement(s)]

    def statement(self, s: Node) -> list[str]:
        match s:
            case k.Let():
                text = expression(s.term, self.scope) if not isinstance(s.term, k.Value) else self.scope.names[s.term]
                self.scope.names[s.value] = s.value.name
                return [f"const {c_type(s.value.type)} {s.value.name} = {text};"]
            case k.Declare():
                return self.declare(s)
            case l.Store():
                return [f"{self.element(s.buffer, s.index)} = {term(s.value, self.scope)};"]
            case k.Move():
                return [f"move<{s.count}>({self.address(s.target, s.to)}, {self.address(s.source, s.at)});"]
            case k.AsyncCopy():
                size = s.count * s.source.type.dtype.size
                inside = f", {guard(s.inside, self.scope)}" if s.inside else ""
                return [f"cp_async<{size}>({self.address(s.target, s.to)}, {self.address(s.source, s.at)}{inside});"]
            case k.Commit():
                return ["cp_async_commit();"]
            case k.WaitGroups():
                return [f"cp_async_wait<{s.open}>();"]
            case k.Sync():
                return ["__syncthreads();"]
            case k.InitBarriers():
                n = s.barriers.type.static_shape[0]
                one = f"barrier_init(shared_address({s.barriers.name} + z), {s.barriers.arrivals});"
                return [f"for (int z = 0; z < {n}; z++) {one}", "barrier_init_fence();"]
            case k.Expect():
                return [f"barrier_expect(shared_address({self.address(s.barriers, (s.slot,))}), {s.bytes});"]
            case k.WaitBarrier():
                return [f"barrier_wait(shared_address({self.address(s.barriers, (s.slot,))}), {index(s.phase, self.scope)});"]
            case k.TensorLoad():
                at = ", ".join(index(e, self.scope) for e in reversed(s.at))
                barrier = f"shared_address({self.address(s.barriers, (s.slot,))})"
                target = (
                    f"shared_address({self.scope.buffers[s.target]} + {self.offset(s.target, s.to)})"  # a slab: its start is not swizzled
                )
                return [f"tma_load_{len(s.at)}d({target}, &{self.maps[s.source, s.box, s.target.swizzle]}, {barrier}, {at});"]
            case k.LoadMatrix():
                move = ldmatrix.move(s.instruction)
                return [f"{move.function}({self.group(s.target, s.to, move.count)}, shared_address({self.address(s.source, s.at)}));"]
            case k.Multiply():
                record = mma_sync.product(s.instruction)
                a, b = self.group(s.a, s.a_at, record.a.registers), self.group(s.b, s.b_at, record.b.registers)
                return [f"{record.function}({self.group(s.d, s.d_at, record.d.registers)}, {a}, {b});"]
            case k.For():
                self.scope.names[s.axis] = i = s.axis.name
                self.unrolled |= {s.axis} if s.unrolled else set()
                head = f"for ({self.int} {i} = 0; {i} < {s.axis.extent}; {i}++) {{"
                return ["#pragma unroll" if s.unrolled else "#pragma unroll 1", head, *self.statements(s.body, "  "), "}"]
            case k.If():
                return [f"if ({guard(s.inside, self.scope)}) {{", *self.statements(s.body, "  "), "}"]
        raise CompilerBug(f"no CUDA for {type(s).__name__}")

    def declare(self, s: k.Declare) -> list[str]:
        kind, name = c_type(s.place.type.dtype), s.place.name
        self.scope.buffers[s.place] = name
        count = 1
        for e in s.place.type.static_shape:
            count *= e
        if not s.place.type.rank:
            return [f"{kind} {name}{f' = {literal(s.init.value, s.init.type)}' if s.init else ''};"]
        lines = [f"alignas(16) {kind} {name}[{count}];"]
        if s.init:
            lines += ["#pragma unroll", f"for (int z = 0; z < {count}; z++) {name}[z] = {literal(s.init.value, s.init.type)};"]
        return lines

    def offset(self, place: l.Buffer, at: Sequence[IntExpr]) -> str:
        return index(flatten(tuple(at), place.type.element_strides), self.scope)

    def element(self, place: l.Buffer, at: Sequence[IntExpr]) -> str:
        """An element of any place."""
        if isinstance(place, k.Registers) and not place.type.rank:
            return place.name
        if isinstance(place, k.Shared) and place.swizzle:
            return f"*{self.address(place, at)}"
        return f"{self.scope.buffers[place]}[{self.offset(place, at)}]"

    def address(self, place: l.Buffer, at: Sequence[IntExpr]) -> str:
        name, offset = self.scope.buffers[place], self.offset(place, at)
        if isinstance(place, k.Shared) and place.swizzle:
            kind = c_type(place.type.dtype)
            return (
                f"reinterpret_cast<{kind}*>(reinterpret_cast<u8*>({name}) + swizzle<{place.swizzle}>({offset} * {place.type.dtype.size}))"
            )
        fixed, moving = self.apart(flatten(tuple(at), place.type.element_strides))
        if place in self.kernel.params and fixed and moving:
            return f"{name} + {index(moving, self.scope)} + {index(fixed, self.scope)}"
        return name if offset == "0" else f"{name} + {offset}"

    def apart(self, offset: IntExpr) -> tuple[IntExpr, IntExpr]:
        """What is constant once loops are unrolled, which an access has room for itself, and the rest, which is then computed once."""
        terms = [(math.prod(fs, start=c), all(f.free <= self.unrolled for f in fs)) for fs, c in terms_of(offset).items()]
        return sum(x for x, unrolled in terms if unrolled), sum(x for x, unrolled in terms if not unrolled)

    def group(self, place: k.Registers, at: Sequence[IntExpr], count: int) -> str:
        """`count` registers as an array."""
        kind = c_type(place.type.dtype)
        return f"reinterpret_cast<{kind} (&)[{count}]>({self.element(place, at)})"
