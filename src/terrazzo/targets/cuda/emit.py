"""A kernel of Kernel IR as CUDA C++, statement by statement. Nothing is decided here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from terrazzo.errors import CompilerBug
from terrazzo.hw import barrier, ldmatrix, mma_sync, tma, wgmma
from terrazzo.hw.transfer import CP_ASYNC, REMOTE, SHUFFLE, VOTE, WIDE
from terrazzo.ir.address import flatten
from terrazzo.ir.canonical import plain
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Loaded, terms_of
from terrazzo.ir.node import Node, topological
from terrazzo.targets.cuda.settle import settled
from terrazzo.targets.names import Names, comment, identifier, words
from terrazzo.targets.terms import (
    Scope,
    address,
    c_type,
    element,
    expression,
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


@lru_cache(maxsize=512)
def emit(kernel: k.Kernel) -> tuple[str, str]:
    """(function name, CUDA source without the prelude) of a kernel. Kernels that differ only in names of buffers have
    the same source. Kept, because whoever chooses schedules asks whether what they become was built before.
    """
    return _Writer(kernel).source()


def gathers(kernel: k.Kernel) -> bool:
    """Whether a kernel has indices from data: it takes one more argument, where it notes that one was out of range."""
    return any(isinstance(x, Loaded) for x in topological(kernel.body))


def _rounded(kernel: k.Kernel) -> set[Node]:
    """Values of bf16 that numbers of f32 are rounded to and that are only converted back: they stay in f32, where one
    instruction rounds.
    """
    found: set[Node] = set()
    others: set[Node] = set()
    for s in k.walk(kernel.body):
        match s:
            case k.Let(term=l.Apply(fn=fn, args=(k.Value(),))) if fn.name == "f32":
                continue
            case k.Let(term=l.Apply(fn=fn, args=(l.Term() as x,))) if (fn.name, x.dtype.name) == ("bf16", "f32"):
                found.add(s.value)
                used: Any = [x]
            case k.Let():
                used = [s.term]
            case k.If():
                used = s.inside
            case k.For() | k.Role():
                continue
            case _:
                used = s.children
        others |= set(topological([x for x in used if isinstance(x, Node)]))
    return found - others


class _Writer:
    def __init__(self, kernel: k.Kernel) -> None:
        self.kernel = kernel
        self.scope = Scope()
        self.maps: dict[k.Map, str] = {}
        self.unrolled: set[Node] = set()
        self.settled = settled(kernel)
        self.rounded = _rounded(kernel)
        largest = max((k.shared_bytes(b) // b.type.dtype.size for b in kernel.params), default=0)
        self.int = "int" if largest < 1 << 31 else "i64"

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
            if variables or (value == "warp" and self.statements_of(k.Role)):
                lines.append(f"  const {self.int} {value} = {text};")
        for s, at in kernel.offsets.items():
            self.scope.buffers[s] = place = self.names.local(plain(s.name))
            kind = c_type(s.type.dtype)
            lines.append(f"  {kind}* const {place} = reinterpret_cast<{kind}*>(shared + {at});")
        lines += self.statements(kernel.body, "  ")
        return name, "\n".join([*lines, "}"]) + "\n"

    def numbers(self) -> dict[str, str]:
        """The variables of a thread. wgmma wants descriptors that the compiler sees to be the same in all lanes."""
        warp = "threadIdx.x / 32"
        return {
            "block": "blockIdx.x",
            "warp": f"__shfl_sync(~0u, {warp}, 0)" if self.statements_of(k.MultiplyAsync) else warp,
            "lane": "threadIdx.x % 32",
        }

    def statements_of(self, *kinds: type) -> list[Node]:
        """The statements of these kinds, in order."""
        return [s for s in k.walk(self.kernel.body) if isinstance(s, kinds)]

    def instructions(self) -> list[str]:
        """The functions of the instructions the kernel uses."""
        every = list(dict.fromkeys(k.walk(self.kernel.body)))
        kinds = {type(x) for x in topological(self.kernel.body)}
        groups = {s.kind for s in every if isinstance(s, k.Commit | k.WaitGroups)}
        lanes = ((k.Move, WIDE), (k.Shuffle, SHUFFLE), (k.Vote, VOTE), (k.Remote, REMOTE))
        texts = [r.cuda for kind, r in lanes if kind in kinds]
        for holds, text in (
            (k.AsyncCopy in kinds or "cp.async" in groups, CP_ASYNC.cuda),
            (any(isinstance(s, k.Barriers) for s in self.kernel.shared), barrier.MBARRIERS),
            (
                k.ClusterSync in kinds or any(isinstance(s, k.Arrive) and s.rank is not None for s in every),
                barrier.CLUSTER,
            ),
            (any(isinstance(s, k.Sync) and s.warps for s in every), barrier.NAMED),
            (k.Fence("proxy") in every, barrier.PROXY),
            (any(isinstance(s, k.Role) and s.registers for s in every), barrier.REGISTERS),
            (k.TensorStore in kinds or "bulk" in groups, tma.STORES),
            (
                k.MultiplyAsync in kinds or "wgmma" in groups or k.Fence("wgmma") in every,
                wgmma.DESCRIPTOR + wgmma.GROUPS,
            ),
        ):
            texts += [text] if holds else []
        loads = sorted({len(s.box) for s in every if isinstance(s, k.TensorLoad)})
        texts += [tma.load_function(rank, self.kernel.cluster > 1) for rank in loads]
        texts += [
            tma.store_function(*x)
            for x in sorted({(len(s.box), s.reduction) for s in every if isinstance(s, k.TensorStore)})
        ]
        for s in every:
            match s:
                case k.LoadMatrix() | k.StoreMatrix():
                    texts.append(ldmatrix.move(s.instruction).cuda())
                case k.Multiply():
                    texts.append(mma_sync.product(s.instruction).cuda())
                case k.MultiplyAsync():
                    product, held = wgmma.product(s.instruction), isinstance(s.a, k.Registers)
                    texts.append(product.cuda(held, s.fresh != -1, s.transposed))
        texts = list(dict.fromkeys(texts))
        return [line for text in texts for line in text.rstrip().splitlines()]

    def statements(self, body: Iterable[Node], indent: str) -> list[str]:
        names, buffers = dict(self.scope.names), dict(self.scope.buffers)
        with self.names.block():
            lines = [indent + line for s in body for line in self.statement(s)]
        self.scope.names, self.scope.buffers = names, buffers  # what was declared ends with the braces around it
        return lines

    def statement(self, s: Node) -> list[str]:
        match s:
            case k.Let(term=l.Apply(args=(x,))) if s.value in self.rounded or x in self.rounded:
                text = term(x, self.scope)
                self.scope.names[s.value] = name = self.names.local(plain(s.value.name))
                return [f"const f32 {name} = {f'tz_round_bf16({text})' if s.value in self.rounded else text};"]
            case k.Let():
                text = expression(s.term, self.scope) if not isinstance(s.term, k.Value) else self.scope.names[s.term]
                self.scope.names[s.value] = name = self.names.local(plain(s.value.name))
                return [f"const {c_type(s.value.type)} {name} = {text};"]
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
            case k.Move():
                return [f"move<{s.count}>({self.address(s.target, s.to)}, {self.address(s.source, s.at)});"]
            case k.Atomic():
                at = f"&{self.scope.buffers[s.buffer]}[{offset(s.buffer, s.index, self.scope)}]"
                return [f"atomic{s.function.capitalize()}({at}, {term(s.value, self.scope)});"]
            case k.AsyncCopy():
                size = s.count * s.source.type.dtype.size
                inside = f", {guard(s.inside, self.scope)}" if s.inside else ""
                return [f"cp_async<{size}>({self.address(s.target, s.to)}, {self.address(s.source, s.at)}{inside});"]
            case k.Commit():
                return [f"{_GROUPS[s.kind]}_commit();"]
            case k.WaitGroups():
                settled = next(self.settled) if s.kind == "wgmma" else ()
                named = [self.scope.buffers[place] for place in settled if place in self.scope.buffers]
                return [f"{_GROUPS[s.kind]}_wait<{s.open}>();", *(f"wgmma_settled({name});" for name in named)]
            case k.Sync():
                return [f"sync<{s.number}, {s.warps * k.WARP}>();" if s.warps else "__syncthreads();"]
            case k.ClusterSync():
                return ["cluster_sync();"]
            case k.Fence():
                return [f"{s.kind}_fence();"]
            case k.InitBarriers():
                n = s.barriers.type.static_shape[0]
                one = f"barrier_init(shared_address({self.scope.buffers[s.barriers]} + z), {s.barriers.arrivals});"
                return [f"for (int z = 0; z < {n}; z++) {one}", "barrier_init_fence();"]
            case k.Expect():
                return [f"barrier_expect(shared_address({self.address(s.barriers, (s.slot,))}), {s.bytes});"]
            case k.Arrive():
                at = f"shared_address({self.address(s.barriers, (s.slot,))})"
                return [
                    f"barrier_arrive({at});"
                    if s.rank is None
                    else f"barrier_arrive_at({at}, {index(s.rank, self.scope)});"
                ]
            case k.WaitBarrier():
                place = f"shared_address({self.address(s.barriers, (s.slot,))})"
                return [f"barrier_wait({place}, {index(s.phase, self.scope)});"]
            case k.TensorLoad():
                at = ", ".join(index(e, self.scope) for e in reversed(s.at))
                place = f"shared_address({self.address(s.barriers, (s.slot,))})"
                function, ranks = ("tma_load_to", f" {s.ranks},") if s.ranks else ("tma_load", "")
                slab, box = self.slab(s.target, s.to), f"&{self.maps[k.map_of(s)]}"
                return [f"{function}_{len(s.at)}d({slab}, {box}, {place},{ranks} {at});"]
            case k.TensorStore():
                at = ", ".join(index(e, self.scope) for e in reversed(s.to))
                slab, box = self.slab(s.source, s.at), f"&{self.maps[k.map_of(s)]}"
                return [f"tma_{s.reduction or 'store'}_{len(s.to)}d({box}, {slab}, {at});"]
            case k.LoadMatrix():
                move = ldmatrix.move(s.instruction)
                place = f"shared_address({self.address(s.source, s.at)})"
                return [f"{move.function}({self.group(s.target, s.to, move.count)}, {place});"]
            case k.StoreMatrix():
                move = ldmatrix.move(s.instruction)
                held = self.packed(s.source, s.at, move.count)
                return [f"{move.function}({held}, shared_address({self.address(s.target, s.to)}));"]
            case k.Multiply():
                record = mma_sync.product(s.instruction)
                a, b = self.packed(s.a, s.a_at, record.a.registers), self.packed(s.b, s.b_at, record.b.registers)
                return [f"{record.function}({self.group(s.d, s.d_at, record.d.registers)}, {a}, {b});"]
            case k.MultiplyAsync():
                product = wgmma.product(s.instruction)
                d, b = self.group(s.d, s.d_at, product.d.registers), self.descriptor(s.b, s.b_at, "b" in s.transposed)
                a = (
                    self.packed(s.a, s.a_at, product.a.registers)
                    if isinstance(s.a, k.Registers)
                    else self.descriptor(s.a, s.a_at, "a" in s.transposed)
                )
                adds = f", !({guard((s.fresh,), self.scope)})" if s.fresh != -1 else ""
                return [f"{product.function(s.transposed)}({d}, {a}, {b}{adds});"]
            case k.Role():
                last = s.first + s.count
                change = (
                    "take" if s.registers > k.REGISTER_FILE // (self.kernel.threads * self.kernel.resident) else "give"
                )
                registers = [f"  {change}_registers<{s.registers}>();"] if s.registers else []
                return [f"if (warp >= {s.first} && warp < {last}) {{", *registers, *self.statements(s.body, "  "), "}"]
            case k.For():
                self.unrolled |= {s.axis} if s.unrolled else set()
                end = s.axis.extent
                steps = index(end, self.scope)
                with self.names.block():
                    self.scope.names[s.axis] = i = self.names.local(s.axis.name)
                    until = str(steps) if isinstance(end, int) else self.names.local(f"{s.axis.name}_end")
                    body = self.statements(s.body, "  ")
                first = f"{self.int} {i} = 0" if isinstance(end, int) else f"{self.int} {i} = 0, {until} = {steps}"
                head = f"for ({first}; {i} < {until}; {i}++) {{"
                return [
                    "#pragma unroll" if s.unrolled else "#pragma unroll 1",
                    head,
                    *body,
                    "}",
                ]
            case k.If():
                return [f"if ({guard(s.inside, self.scope)}) {{", *self.statements(s.body, "  "), "}"]
        raise CompilerBug(f"no CUDA for {type(s).__name__}")

    def slab(self, place: k.Shared, at: Sequence[IntExpr]) -> str:
        """The address of a slab in shared memory: its start is not swizzled."""
        return f"shared_address({self.scope.buffers[place]} + {offset(place, at, self.scope)})"

    def descriptor(self, place: l.Buffer, at: Sequence[IntExpr], transposed: bool) -> str:
        assert isinstance(place, k.Shared)
        return f"slab_descriptor<{wgmma.slab(place, transposed).bits:#x}ull>({self.slab(place, at)})"

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

    def group(self, place: k.Registers, at: Sequence[IntExpr], count: int) -> str:
        """`count` registers as an array."""
        kind = c_type(place.type.dtype)
        return f"reinterpret_cast<{kind} (&)[{count}]>({self.element(place, at)})"

    def packed(self, place: l.Buffer, at: Sequence[IntExpr], count: int) -> str:
        """`count` 32-bit registers as an array, perhaps of several elements each."""
        return f"reinterpret_cast<const u32 (&)[{count}]>({self.element(place, at)})"


_GROUPS = {"cp.async": "cp_async", "wgmma": "wgmma", "bulk": "tma"}
