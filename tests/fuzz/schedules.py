"""Random schedules for fixed terms: bindings made to fit, and bindings broken on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st

from terrazzo.front.capture import capture
from terrazzo.interp.torch import to_numpy
from terrazzo.ir.address import mentions
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import topological
from terrazzo.ir.program import Program
from terrazzo.ir.schedule import KERNEL_LEVELS, SITE_LEVELS, Binding, Factor, Like, Operand, Schedule, Site, Word
from terrazzo.ir.sites import Product, product
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.chains.chain import Chain, chain
from tests.fuzz import chains
from tests.kernels.programs import CASES, b, h, n, r

SMALL: dict[str, Callable[[], tuple[Any, ...]]] = {
    "matmul": lambda: (r(18, 23), r(23, 35)),
    "matmul, first transposed": lambda: (r(24, 16), r(24, 32)),
    "bmm": lambda: (r(3, 9, 16), r(3, 16, 17)),
    "einsum": lambda: (r(9, 3, 8), r(16, 3, 8)),
    "product and row sums": lambda: (r(17, 4), r(4, 20)),
    "swiglu of float": lambda: (r(10, 24), r(20, 24), r(20, 24)),
    "conv1d": lambda: (r(2, 4, 20), r(8, 4, 3)),
    "matmul of bfloat16": lambda: (b(32, 64), b(64, 48)),
    "ragged matmul of bfloat16": lambda: (b(19, 24), b(24, 40)),
    "transposed matmul of bfloat16": lambda: (b(48, 32), b(48, 40)),
    "bmm of half": lambda: (h(2, 16, 32), h(2, 32, 24)),
    "swiglu": lambda: (b(16, 32), b(24, 32), b(24, 32)),
    "residual": lambda: (b(17, 32), b(32, 32), b(17, 32)),
    "rms norm of prime width": lambda: (r(3, 131), r(131)),
    "softmax": lambda: (r(9, 100),),
    "softmax of the first axis": lambda: (r(40, 36),),
    "variance": lambda: (r(5, 128),),
    "argmax of few values": lambda: (r(9, 70).round(),),
    "sum of the middle axis": lambda: (r(3, 17, 18),),
    "sum of short rows": lambda: (r(90, 5),),
    "sum of all": lambda: (r(7, 30),),
    "sum of the outer axes": lambda: (r(3, 5, 18),),
    "batch norm": lambda: (r(2, 3, 4, 4),),
    "logsumexp": lambda: (r(5, 77),),
    "any": lambda: (r(9, 64),),
    "gelu": lambda: (r(8, 50),),
    "permuted": lambda: (r(6, 10, 7),),
    "two results": lambda: (r(12, 33),),
    "broadcast": lambda: (r(3, 1, 17), r(6, 1), r(17)),
    "gather": lambda: (r(5, 20), n(20, 5, 13)),
    "cat": lambda: (r(5, 7), r(5, 9)),
    "cumsum": lambda: (r(9, 40),),
    "cumsum of the first axis": lambda: (r(30, 20),),
    "attention of half": lambda: (h(1, 40, 32), h(1, 72, 32), h(1, 72, 32).abs()),
    "causal attention": lambda: (b(1, 2, 80, 32), b(1, 2, 80, 32), b(1, 2, 80, 32).abs()),
    "grouped attention": lambda: (b(2, 4, 1, 32), b(2, 2, 150, 32), b(2, 2, 150, 32).abs()),
    "relu between products": lambda: (b(1, 2, 80, 32), b(1, 2, 100, 32), b(1, 2, 100, 64)),
    "scalar": lambda: (torch.tensor(3.0),),
    "empty sum": lambda: (r(0, 4),),
}
"""Arguments, small enough to simulate many schedules, for functions of `tests/kernels/programs.py`."""
TERMS = tuple(SMALL)
OWN: dict[str, Callable[..., Any]] = {
    "rms norm of prime width": lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w),
    "relu between products": lambda q, k, v: torch.relu(q @ k.transpose(-1, -2)) @ v,
}
"""Functions that are no such program, or whose shapes are others here."""
INSTRUCTIONS = (
    *(
        "fma.f32",
        "mma.m16n8k16.f32.bf16",
        "mma.m16n8k16.f32.f16",
        "mma.m16n8k8.f32.f16",
        "wgmma.m64n64k16.f32.bf16",
        "mma.m1n1k1",
        None,
    ),
)
FACTOR_OPTIONS = (
    *(("ring", n) for n in (2, 3, 1, 0, "many")),
    *(
        ("order", word)
        for word in (Word("grouped", (2,)), Word("grouped", (0,)), Word("grouped"), Word("longest_first"))
    ),
    ("promote", True),
    ("promote", 2),
    ("nothing", 1),
)


@dataclass(frozen=True, eq=False, repr=False)
class Term:
    """A program with its inputs, what is scheduled by default, and which of its kernels a schedule is drawn for."""

    program: Program
    inputs: dict[str, Any]
    kernel: l.Kernel
    default: Schedule


@cache
def terms(name: str, target: str) -> tuple[Term, ...]:
    """The kernels of one of `TERMS`, as they are before and as they are after axes were merged for a schedule."""
    torch.manual_seed(0)
    args = SMALL[name]()
    fn = OWN.get(name) or CASES[name].fn
    captured = capture(fn, args, {})
    found = lowering(captured.program, Options(target=target))
    program: Program = found.at("tensor")
    varying = iter([a for a in args if isinstance(a, torch.Tensor)])
    inputs = {
        i.name: to_numpy(captured.bound[i.name] if i.name in captured.bound else next(varying)) for i in program.inputs
    }
    tiled = found.at("tile")
    chosen = {tiled.loop.steps[i].name: (tiled.loop.steps[i], s) for i, s in tiled.schedules}
    out = [Term(program, inputs, kernel, s) for kernel, s in chosen.values()]
    raw = [s for s in found.loop.steps if isinstance(s, l.Kernel) and s.name in chosen and s is not chosen[s.name][0]]
    return (*out, *(Term(program, inputs, s, chosen[s.name][1]) for s in raw))


@st.composite
def schedules(draw: Any, term: Term) -> Schedule:
    """A schedule for the kernel of a term."""
    drawer = _Drawer(draw, term.kernel, term.default)
    found, nested = product(term.kernel), chain(term.kernel)
    if nested is not None and drawer.one((True, True, True, True, False)):
        schedule = drawer.chained(nested)
    elif found is not None and drawer.one((True, True, True, False)):
        schedule = drawer.arranged(found)
    else:
        schedule = drawer.divided() if drawer.one((*(True,) * 6, False)) else term.default
    for _ in range(drawer.one((*(0,) * 16, 1, 2)) if schedule is not term.default else drawer.one((1, 1, 2, 3))):
        schedule = drawer.changed(schedule)
        schedule = drawer.covering(schedule) if draw(st.sampled_from((True, True, True, False))) else schedule
    return schedule


@dataclass
class _Drawer:
    draw: Any
    kernel: l.Kernel
    default: Schedule

    def __post_init__(self) -> None:
        self.free = {a.name: _extent(a) for a in self.kernel.axes}
        self.own = {
            name: {f"r{a.label}": _extent(a) for a in r.axes} if isinstance(r, l.Reduce) else {}
            for name, r in accumulators(self.kernel).items()
        }
        scans = [r for r in accumulators(self.kernel).values() if isinstance(r, l.Scan)]
        self.scanned = {a.name for a in self.kernel.axes for r in scans if mentions(r.at, a)}
        self.stores = [b.name for b in self.kernel.writes]
        self.reads = [
            x.buffer.name for x in topological([s.value for s in self.kernel.stores]) if isinstance(x, l.Load)
        ]

    def one(self, items: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(items))

    # -- products in every arrangement --------------------------------------------------------------------------------

    def arranged(self, p: Product) -> Schedule:
        """Who loads and who multiplies, on what, in which order the tiles are walked, how results leave."""
        number = int(self.default.target.removeprefix("sm_").rstrip("a"))
        m, n = (p.m, p.n) if self.one((True, True, True, False)) else (p.n, p.m)
        on = self.instruction_for(p, number)
        boxes = number >= 90 and on != "fma.f32" and self.one((True, True, False))
        by = "tma" if boxes else self.one(("ld", "cp.async") if number >= 80 else ("ld",))
        roles = by == "tma" and self.one((True, False))
        groups, warps, inside = self.inside(on, roles)
        cluster = number >= 90 and self.one((True, False, False))
        cut = self.one((m, n))
        lines: list[tuple[str, Binding]] = [(a.name, (Factor("grid", 1),)) for a in p.batch]
        for a, part in ((m, "m"), (n, "n")):
            shared = (Factor("cluster", self.one((2, 2, 4))),) if cluster and a is cut else ()
            lines.append(
                (a.name, (Factor("grid", 1), *shared, Factor("block", math.prod(f.size for f in inside[part]))))
            )
        step = math.prod(f.size for f in inside["k"])
        ring = self.one((2, 3, 4, 1) if by != "tma" else (2, 3, 4, 5))
        last = p.axes[-1]
        lines += [(f"r{a.label}", (Factor("time", a.extent),)) for a in p.axes[:-1]]
        lines.append((f"r{last.label}", (Factor("time", 1, (("ring", ring),)), Factor("block", step))))
        lengths = {m: inside["m"], n: inside["n"], last: inside["k"]}
        operands = {}
        for x in p.operands:
            for load in [y for y in topological([x]) if isinstance(y, l.Load)]:
                multicast = cluster and roles and "wgmma" in on and cut not in x.free
                operands[load.buffer.name] = self.held(load, lengths, by, on, multicast and self.one((True, False)))
        own = ((m.name, inside["m"]), (n.name, inside["n"]), (f"r{last.label}", inside["k"]))
        found = [Site(p.names, own, tuple(operands.items()), on)]
        split = any(f.level.startswith("warp") and f.size > 1 for f in inside["k"])  # whose sums meet in registers
        staged = on != "fma.f32" and self.one((True, False)) and (not split or self.one((True, *(False,) * 9)))
        for s in self.kernel.stores:
            size = s.buffer.type.dtype.size
            width = min(128, math.prod(f.size for f in inside["n"]) * size)
            by_box = number >= 90 and self.one((True, False))
            options: dict[str, Any] = {"by": "tma"} if by_box else {}
            options |= (
                {"swizzle": width}
                if width in (32, 64, 128) and self.one((True, False))
                else {}
                if by_box
                else {"pad": 8}
            )
            like = tuple((a.name, Like(p.names[0])) for a in (m, n))
            found.append(
                Site(
                    (s.buffer.name,),
                    () if staged else like,
                    ((s.buffer.name, Operand("smem", tuple(options.items()))),) if staged else (),
                )
            )
        directives: list[Any] = []
        if self.one((True, False)):
            size = next((f.size for _, b in lines if not isinstance(b, Like) for f in b if f.level == "cluster"), 1)
            directives.append(("persistent", (size * self.one((1, 2, 3)),), ()))
        if roles:
            who = Word("warpgroup", (groups,)) if groups else Word("warp", (warps,))
            more = (("registers", (40, self.one((216, 232)))),) if groups and self.one((True, False)) else ()
            directives.append(("roles", (), (("load", Word("warp", (1,))), ("math", who), *more)))
        return self.covering(
            Schedule(self.kernel.name, self.default.target, tuple(lines), (), tuple(directives), tuple(found))
        )

    def chained(self, c: Chain) -> Schedule:
        """Two products in one loop of steps."""
        return self.covering(chains.drawn(c, self.default.target, self.one))

    def instruction_for(self, p: Product, number: int) -> str:
        """One that takes the operands."""
        name = p.operands[0].dtype.name  # type: ignore[attr-defined]
        short = {"bf16": "bf16", "f16": "f16", "bfloat16": "bf16", "float16": "f16"}.get(name)
        if short is None or len(p.axes) > 1:
            return "fma.f32"
        found = ["fma.f32"]
        found += (
            [f"mma.m16n8k16.f32.{short}"] * 2 if number >= 80 else ["mma.m16n8k8.f32.f16"] if short == "f16" else []
        )
        if self.default.target == "sm_90a":
            found += [f"wgmma.m64n{self.one((8, 16, 24, 32, 64))}k16.f32.{short}"] * 4
        return str(self.one(found))

    def inside(self, on: str, roles: bool) -> tuple[int, int, dict[str, tuple[Factor, ...]]]:
        """How many warpgroups or warps, and how they divide m, n and a step's k."""

        def some(level: str, *sizes: int) -> tuple[Factor, ...]:
            size = self.one(sizes)
            return (Factor(level, size),)

        def inst(letter: str, size: int) -> tuple[Factor, ...]:
            return (Factor(f"inst.{letter}", size),)

        if on.startswith("wgmma"):
            groups, n = self.one((1, 1, 2, 3)), int(on.split("n")[1].split("k")[0])
            down = (Factor("warpgroup", groups), *some("reg", 1, 1, 2), *inst("m", 64))
            shared = some("warpgroup", 1, 1, 2) if not roles else ()
            deep = (*shared, *some("reg", 1, 2, 4), *inst("k", 16))
            return groups, 0, {"m": down, "n": (*some("reg", 1, 1, 2), *inst("n", n)), "k": deep}
        a, b, c = self.one((1, 2)), self.one((1, 2)), self.one((1, 1, 2))
        warp = [(Factor("warp", x),) if x > 1 else () for x in (a, b, c)]
        if on.startswith("mma"):
            depth = int(on.split("k")[1].split(".")[0])
            down, across = (
                (*warp[0], *some("reg", 1, 2), *inst("m", 16)),
                (*warp[1], *some("reg", 1, 2, 4), *inst("n", 8)),
            )
            return 0, a * b * c, {"m": down, "n": across, "k": (*warp[2], *some("reg", 1, 2), *inst("k", depth))}
        lanes = self.one(((4, 8, 1), (8, 4, 1), (4, 4, 2), (1, 32, 1)))
        m, n, k = ((*w, *((Factor("lane", x),) if x > 1 else ())) for w, x in zip(warp, lanes, strict=True))
        return (
            0,
            a * b * c,
            {
                "m": (*m, *some("reg", 1, 2)),
                "n": (*n, *some("reg", 1, 2, 4)),
                "k": (*k, Factor("reg", self.one((4, 8)))),
            },
        )

    def held(self, load: l.Load, lengths: dict[Any, Any], by: str, on: str, multicast: bool) -> Operand:
        """An operand in shared memory, swizzled as far as its rows are long."""
        along = next((a for a in lengths if load.index and load.index[-1] is a), None)
        row = math.prod(f.size for f in lengths[along]) * load.dtype.size if along is not None else 0
        options: dict[str, Any] = {"by": by}
        if on != "fma.f32":
            options |= {"swizzle": next((s for s in (128, 64, 32) if row % s == 0), 32)}
        elif by != "tma" and self.one((True, False)):
            options |= {"pad": 4}
        return Operand("smem", tuple((options | ({"multicast": True} if multicast else {})).items()))

    # -- what fits ----------------------------------------------------------------------------------------------------

    def divided(self) -> Schedule:
        """Blocks take parts of the free axes; every site divides its part among the same number of warps, in its own
        way.
        """
        warps = self.one((1, 2, 4, 8))
        lines: list[tuple[str, Binding]] = []
        block: dict[str, int] = {}
        product = any(s.instruction for s in self.default.sites) and chain(self.kernel) is None
        alone = not product and self.draw(st.booleans())  # whether the threads are divided once, for all sites
        ordered = self.scanned if self.one((*(True,) * 9, False)) else set()
        threads = self.shared([a for a in self.free if a not in ordered], warps) if alone else {}
        for axis in self.free:
            if axis in ordered:
                lines.append((axis, (Factor("time", 1),)))
                block[axis] = 0
            elif alone:
                inner = threads.get(axis, ())
                lines.append((axis, (Factor(self.one(("grid", "grid", "time")), 1), *inner)))
            elif (kind := self.kind(product, axis, block)) != "none":
                block[axis] = self.one((1, 2, 4, 8, 16, 32)) if kind == "block" else 0
                lines.append((axis, (Factor("grid", 1), *([Factor("block", block[axis])] if kind == "block" else []))))
        sites: list[Site] = []
        for name, own in [*self.own.items(), *((s, {}) for s in self.stores)]:
            here = [a for a in self.free if block.get(a, 1)] if not alone else []
            alike = self.one((True, True, True, True, False) if product else (True, False))
            if sites and alike and (product or name in self.stores):
                sites.append(Site((name,), tuple((a, Like(sites[0].names[0])) for a in here)))
                continue
            divided = self.shared([*here, *own], 1 if alone else warps, 1 if alone else 32)
            lead = ("reg",) if product else ("reg", "time")
            axes = {a: (Factor(self.one(lead if a not in block else ("reg",)), 1), *f) for a, f in divided.items()}
            operands = tuple({x: self.operand() for x in self.reads}.items()) if product and own else ()
            sites.append(Site((name,), tuple(axes.items()), operands, "fma.f32" if product and own else None))
        if product:
            for axis in {a for own in self.own.values() for a in own}:
                step = self.one((1, 4, 8, 16, 32))
                lines.append((axis, (Factor("time", 1, (("ring", self.one((1, 2, 3))),)), Factor("block", step))))
        return self.covering(Schedule(self.kernel.name, self.default.target, tuple(lines), (), (), tuple(sites)))

    def kind(self, product: bool, axis: str, block: dict[str, int]) -> str:
        """Whether blocks walk an axis, or have parts of it: of one at least, where there is a product."""
        if product and axis == [*self.free][-1] and not any(block.values()):
            return "block"
        return str(self.one(("grid", "block", "none") if product else ("grid", "grid", "none")))

    def shared(self, axes: Sequence[str], warps: int, lanes: int = 32) -> dict[str, tuple[Factor, ...]]:
        """Warps and lanes dealt out to axes in powers of two, with registers between them."""
        out: dict[str, list[Factor]] = {a: [] for a in axes}
        for level, count in (("warp", warps), ("lane", lanes)):
            while count > 1 and axes:
                part = self.one([p for p in (count, 2, 4, 8) if p <= count and count % p == 0])
                out[self.one(axes)].append(Factor(level, part))
                count //= part
        for a in axes:
            if self.one((True, False)):
                out[a].insert(self.draw(st.integers(0, len(out[a]))), Factor("reg", self.one((2, 4, 3, 1))))
        return {a: tuple(f) for a, f in out.items()}

    def covering(self, s: Schedule) -> Schedule:
        """The same with blocks as large as what divides them, and with first factors that just cover their axes."""
        inside: dict[str, int] = {}
        for site in s.sites:
            for axis, own in site.axes:
                if not isinstance(own, Like):
                    inside.setdefault(axis, math.prod(f.size for f in own))

        def sized(axis: str, b: Binding, extent: int | None, block: int | None) -> Binding:
            if isinstance(b, Like) or not b:
                return b
            out = [replace(f, size=inside.get(axis, f.size)) if f.level == "block" else f for f in b]
            rest = math.prod(f.size for f in out[1:])
            if block is not None and rest and block % rest == 0:
                out[0] = replace(out[0], size=max(block // rest, 1))
            elif block is None and extent is not None and rest > 0 and out[0].level != "block":
                out[0] = replace(out[0], size=max(-(-extent // rest), 1))
            return tuple(out)

        everywhere = {**self.free, **{a: e for own in self.own.values() for a, e in own.items()}}
        lines = tuple((a, sized(a, b, everywhere.get(a), None)) for a, b in s.axes)
        blocks = {a: f.size for a, b in lines if not isinstance(b, Like) for f in b if f.level == "block"}
        sites = tuple(
            replace(
                x,
                axes=tuple(
                    (a, sized(a, b, {**everywhere, **self.own.get(x.names[0], {})}.get(a), blocks.get(a)))
                    for a, b in x.axes
                ),
            )
            for x in s.sites
        )
        return replace(s, axes=lines, sites=sites)

    def operand(self) -> Operand:
        number = int(self.default.target.removeprefix("sm_").rstrip("a"))
        known = [by for by, since in (("ld", 0), ("ld", 0), ("cp.async", 80), ("tma", 90)) if since <= number]
        by = self.one((*known * 4, "tma"))
        options: dict[str, Any] = {"by": by}
        if self.one((True, False)):
            options |= self.one(
                ({"swizzle": 128}, {"swizzle": 64}, {"swizzle": 32}, {"pad": 4}, {"pad": 8}, {"pad": 1})
            )
        if self.one((True, False, False)):
            options["along"] = self.one((*self.free, *(a for own in self.own.values() for a in own), "nowhere"))
        return Operand("smem", tuple(options.items()))

    # -- what may not fit ---------------------------------------------------------------------------------------------

    def changed(self, s: Schedule) -> Schedule:
        """One thing changed, anywhere."""
        places = [-1, *range(len(s.sites))]
        place = self.one(places)
        match self.one(("binding", "binding", "binding", "operand", "instruction", "site", "directive", "like")):
            case "binding":
                lines = s.axes if place < 0 else s.sites[place].axes
                return _with(s, place, axes=self.rebound(lines))
            case "operand" if place >= 0:
                given = dict(s.sites[place].operands)
                name = self.one((*(given or self.reads), *self.reads, "nothing"))
                given[name] = self.one(
                    (
                        self.operand(),
                        Operand("reg"),
                        Operand("smem", (("by", "magic"),)),
                        Operand("smem", (("swizzle", 7),)),
                    )
                )
                return _with(s, place, operands=tuple(given.items()))
            case "operand":
                name = self.one((*self.reads, *self.own, "nothing"))
                return replace(
                    s, operands=tuple({**dict(s.operands), name: Operand(self.one(("reg", "smem")))}.items())
                )
            case "instruction" if place >= 0:
                return _with(s, place, instruction=self.one(INSTRUCTIONS))
            case "site" if s.sites:
                kept = [x for n, x in enumerate(s.sites) if n != place]
                return replace(s, sites=tuple(self.draw(st.permutations(kept))))
            case "directive":
                return replace(
                    s,
                    directives=(
                        self.one(
                            (("resident", (2,), ()), ("persistent", (), ()), ("resident", (0,), ()), ("roles", (), ()))
                        ),
                    ),
                )
            case "like" if place >= 0:
                names = [
                    f"{x}{r}" for x in (*self.own, *self.stores) for r in ("", *(f".{a}" for a in self.own.get(x, {})))
                ]
                lines = dict(s.sites[place].axes)
                lines[self.one((*lines, *self.free, "nowhere"))] = Like(self.one((*names, "nowhere")))
                return _with(s, place, axes=tuple(lines.items()))
        return s

    def rebound(self, lines: tuple[tuple[str, Binding], ...]) -> tuple[tuple[str, Binding], ...]:
        """The lines with one factor changed, added, dropped or moved."""
        own = [a for o in self.own.values() for a in o]
        axis = self.one((*dict(lines), *self.free, *own, "nowhere"))
        found = dict(lines).get(axis, ())
        factors = [] if isinstance(found, Like) else list(found)
        n = self.draw(st.integers(0, max(len(factors) - 1, 0)))
        size = self.one((2, 4, 1, 3, 8, 16, 32, 0, -1, 1000))
        level = self.one((*SITE_LEVELS[1:4], *KERNEL_LEVELS, *SITE_LEVELS))
        match self.one(("add", "size", "level", "drop", "swap", "split", "option")) if factors else "add":
            case "add":
                factors.insert(n, Factor(level, size))
            case "size":
                factors[n] = replace(
                    factors[n], size=self.one((factors[n].size * 2, factors[n].size // 2, factors[n].size + 1, size))
                )
            case "level":
                factors[n] = replace(factors[n], level=level)
            case "drop":
                factors.pop(n)
            case "swap":
                factors = list(self.draw(st.permutations(factors)))
            case "split":
                by = self.one((2, 4))
                factors[n : n + 1] = [
                    replace(factors[n], size=max(factors[n].size // by, 1)),
                    Factor(factors[n].level, by),
                ]
            case "option":
                factors[n] = replace(factors[n], options=(self.one(FACTOR_OPTIONS),))
        bindings = {**dict(lines), axis: tuple(factors)}
        return tuple((a, b) for a, b in bindings.items() if b)


def _with(s: Schedule, place: int, **fields: Any) -> Schedule:
    if place < 0:
        return replace(s, **fields)
    return replace(s, sites=(*s.sites[:place], replace(s.sites[place], **fields), *s.sites[place + 1 :]))


def _extent(axis: Any) -> int:
    assert isinstance(axis.extent, int)
    return axis.extent
