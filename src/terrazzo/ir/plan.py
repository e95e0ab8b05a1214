"""Plans: schedules in which nothing is left open (ADR 008).

A schedule binds axes and names places; a plan says everything else too: who walks which tiles in which order, which
warps do what, how every operand lies in shared memory and gets there, on which instruction a product runs and where its
factors come from, where partial states meet, how results leave. Rules complete it, one decision each (`rules/tile`);
Kernel IR is written from it, and the writer decides nothing.

The text is one line for each decision, in Python's syntax, parsed and never run:

    with plan("linear", target="sm_90a"):
        order(tiles=(a0(16), a1(16)), blocks=132, cluster=a0(2), grouped=(a0(8),), persistent=True)
        load = agent(first=0, warps=4, registers=40)
        math = agent(first=4, warps=8, teams=2, registers=232)
        ring0 = ring(over=(r0(64),), slots=4, ahead=4, by="tma", producer=load, consumer=math)
        x_s = stream("x[a0, r0]", ring=ring0, axes=(a0(128), r0(64)), memory=r0, swizzle=128)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from terrazzo.errors import UserError
from terrazzo.ir.node import Node, derived
from terrazzo.ir.schedule import Word, show_value

EVERYONE = "all"
"""The agent of a kernel whose warps all do the same."""
VALUES = "values"
"""Where a factor comes from that was computed, and lies in registers."""
STORED = "stored"
"""Where one comes from that was computed, and lies in shared memory."""
COMPUTED = (VALUES, STORED)
AXIS = "axis"
"""What a field refers to that names an axis."""


class Line(Node):
    """One decision of a plan. A line whose first field is `name` prints as an assignment to it."""

    references: ClassVar[Mapping[str, str]] = {}
    """The fields that name other lines, with the op of these, or an axis ("axis"). They print without quotes."""

    def __str__(self) -> str:
        first, given = ("", self._fields)
        if self._fields[:1] == ("name",):
            first, given = f"{self.name} = ", self._fields[1:]  # type: ignore[attr-defined]
        parts = []
        for f in given:
            value = getattr(self, f)
            if f in self._defaults and value == self._defaults[f]:
                continue
            parts.append(f"{f}={_shown(value) if f in self.references else show_value(value)}")
        return f"{first}{self.op}({', '.join(parts)})"

    def __repr__(self) -> str:
        return str(self)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))}{',' if len(value) == 1 else ''})"
    return str(value)


class Order(Line, dialect="plan", op="order"):
    """Which tiles there are, and who walks them.

    The last axis of `tiles` counts fastest, but for an axis of `grouped`, of which so many rows are walked down first.
    The tiles of `backward` axes are walked from the last to the first. The steps of a tile begin with that of its
    number along `begin` and go around, so that tiles which differ in it do not ask for the same at once.
    The blocks of a cluster divide `cluster`'s axis. Where the order is `persistent`, every cluster walks all tiles
    whose numbers are `blocks` (over the cluster's size) apart, from its own number on.
    """

    tiles: tuple[Word, ...]
    blocks: int
    cluster: tuple[Word, ...] = ()
    grouped: tuple[Word, ...] = ()
    backward: tuple[str, ...] = ()
    persistent: bool = False
    begin: str = ""

    @property
    def count(self) -> int:
        """How many tiles there are, those of a cluster counted as one."""
        total = 1
        for w in self.tiles:
            total *= w.args[0]
        return total

    @property
    def cluster_size(self) -> int:
        """Blocks in a cluster."""
        total = 1
        for w in self.cluster:
            total *= w.args[0]
        return total

    @property
    def walkers(self) -> int:
        """Clusters that are launched."""
        return self.blocks // self.cluster_size


class Agent(Line, dialect="plan", op="agent"):
    """Warps `first` to `first + warps - 1`, which do the same. `teams` of them work and wait each by itself: on their
    parts of a tile, or, with `turns`, on one tile after the other, in which one multiplies while others store. With
    `lag`, a team begins a step when the one before it has begun that, or has the sums that its factors are made of, or
    has made them of slabs: one multiplies while another stores or makes factors.

    With `registers`, a thread has so many; else as many as it began with.
    """

    name: str
    first: int
    warps: int
    teams: int = 1
    registers: int = 0
    turns: bool = False
    lag: bool = False

    @property
    def each(self) -> int:
        """Warps of a team."""
        return self.warps // self.teams


class Ring(Line, dialect="plan", op="ring"):
    """Slots that slabs come to, step by step of the loops `over` (none: once for a tile), `ahead` steps early at most.

    `by` is the transport: "ld" (through registers), "cp.async" or "tma". The consumer frees a slot one step late where
    `late`: its products are still on their way when the next ones start.
    """

    references = {"producer": "agent", "consumer": "agent"}
    name: str
    over: tuple[Word, ...]
    slots: int
    ahead: int
    by: str
    producer: str
    consumer: str
    late: bool = False

    @property
    def steps(self) -> int:
        """Steps for a tile."""
        total = 1
        for w in self.over:
            total *= w.args[0]
        return total


class Stream(Line, dialect="plan", op="stream"):
    """An operand that comes to the slots of a ring, as a slab of these axes, outermost first, with their lengths.

    Global memory is contiguous along `memory`; `vector` elements are moved at once by each thread, or the whole slab is
    one box (`vector` 0), of which each of `multicast` blocks of a cluster fetches its share for all. In shared memory
    rows are padded by `pad` elements or swizzled; where they are wider than the swizzle, there are panels, one behind
    the other, `panel` elements wide. A box is one of the buffer or, `by_axes`, of its memory as a tensor that has a
    dimension for every axis of the operand. Operands that are the same slab `also` come with it. A slab may lie
    `behind` another one, as more columns of the same instruction. Where it stands `beside` a product, it is no factor:
    what is made of the product's sums is made of it too, where these lie.
    """

    references = {"ring": "ring", "memory": AXIS, "behind": "stream"}
    name: str
    operand: str
    ring: str
    axes: tuple[Word, ...]
    memory: str
    vector: int
    swizzle: int = 0
    pad: int = 0
    panel: int = 0
    multicast: int = 1
    by_axes: bool = False
    also: tuple[str, ...] = ()
    behind: str = ""
    beside: bool = False

    @property
    def read(self) -> bool:
        """Whether threads read it themselves, number by number: it is a vector, or beside a product."""
        return self.beside or len(self.axes) == 1


class Product(Line, dialect="plan", op="product"):
    """Contractions on an instruction, by an agent: m and n are the axes of its rows and columns. Where rows are points
    of several axes, these are a `box`, and m is the first that the instruction divides.

    Factors come from "shared" memory or from "registers", to which fragments are brought by an instruction
    ("ldmatrix"), by plain loads ("ld"), in which they are made of a slab point by point ("converted"), or in which what
    was computed already lies ("values"); or what was computed is put into shared memory ("stored"), from where they
    are read as those of others are. With `promote`, its sums begin afresh in every step, and CUDA cores add them
    to those of the tile: a tensor core truncates as it adds. With `early`, those of the next step start before what is
    made of this step's is multiplied: CUDA cores compute the next weights while the tensor cores multiply by the last
    ones.
    """

    references = {"agent": "agent", "rings": "ring", "m": AXIS, "n": AXIS, "box": AXIS}
    sites: tuple[str, ...]
    on: str
    agent: str
    rings: tuple[str, ...]
    m: str
    n: str
    a: str
    b: str
    promote: bool = False
    box: tuple[str, ...] = ()
    early: bool = False

    @property
    def made(self) -> str:
        """Which factor is made of other products' sums: "a" or "b", or neither."""
        return next((x for x in ("a", "b") if getattr(self, x) in COMPUTED), "")

    @property
    def rows(self) -> str:
        """The axis that its first factor has besides the steps', or the one that is made of sums."""
        return self.n if self.made == "b" else self.m


class Stage(Line, dialect="plan", op="stage"):
    """What is made of the sums `of` a site lies in shared memory, from where another `product` takes it: a slab of
    these axes, outermost first, with their lengths, in one of `slots`, step by step. It is swizzled as a stream is, or
    in panels. Threads meet once in a step, and twice where others load and there is one slot only.
    """

    name: str
    of: str
    product: str
    axes: tuple[Word, ...]
    slots: int
    swizzle: int = 0
    panel: int = 0

    @property
    def stream(self) -> Stream:
        """It as a stream, of a ring of its own."""
        return Stream(self.name, self.of, self.name, self.axes, self.axes[-1].name, 0, self.swizzle, panel=self.panel)


class Convert(Line, dialect="plan", op="convert"):
    """A value comes to the layout that its use wants: an operand's slab to the fragments of a product's first or second
    factor (`to="acc0.a"`), the sums of a product to a factor of another or to a slab (`stage`), that slab to
    fragments, a store's values to their slab.

    `by` is an instruction that moves whole matrices, "st" where neighbours are put there plainly, "ld" where threads
    load neighbours and compute a factor of them, "parts" where that are the parts of numbers, which most of them need
    few operations for, "registers", where values lie as is wanted and are rounded where they are, "mov", where lanes
    have them in other registers, or "movmatrix", which transposes matrices in registers. `layout` says which register
    of which lane has which element on the side of the registers, for as much as is moved at once.
    """

    value: str
    to: str
    by: str
    layout: str


class Frame(Line, dialect="plan", op="frame"):
    """A product's values are weighted by exp(score - top), where the maximum `top` and the sum of weights `total` are
    found in the same steps: sums are brought to the new maximum whenever it grows; or, with `above`, only where a score
    is so far above the one that they were brought to last: no weight is more than exp of that.
    """

    top: str
    product: str
    total: str = ""
    above: int = 0


class Rescue(Line, dialect="plan", op="rescue"):
    """Where a warp has sums `of` a site that will not do, as the term says, it sums others in their place on CUDA
    cores, from memory: those of `site`, one after the other, or, where they are many, all that it has of the tile.
    """

    site: str
    of: str


class Reach(Line, dialect="plan", op="reach"):
    """Only steps along an axis before `until` are visited, and from `since` on, where that is not negative, given which
    tile of `rows` it is (its number is `first`), or where it is along axes that no tile has a part of: a mask leaves
    nothing of the others. Of these no more than hold the `length` that data says are visited, and those of blocks from
    the number `at_first` on and before `at_last`.
    """

    references = {"axis": AXIS, "rows": AXIS}
    axis: str
    rows: str
    until: str
    since: str = ""
    length: str = ""
    at_first: str = ""
    at_last: str = ""


class Combine(Line, dialect="plan", op="combine"):
    """Where the partial states of a reduction or a scan meet: `lanes` by shuffles, `warps` through shared memory,
    `blocks` of a cluster through each other's. Of a product's tile, each of the first `parts` blocks then has the sums
    of so many-th of the columns.
    """

    site: str
    lanes: int = 1
    warps: int = 1
    blocks: int = 1
    parts: int = 1


class Keep(Line, dialect="plan", op="keep"):
    """A buffer's loads (or a reduction's summands, or what is stored) stay in registers between their uses."""

    what: str


class Jam(Line, dialect="plan", op="jam"):
    """A thread takes each step of the reductions for all its `points` of some axes together: what their loads have in
    common is loaded once, and what depends on no point is computed once. Where an axis has several loops of steps, one
    in the other, reductions over an inner one start afresh, and meet those of the one around.
    """

    points: tuple[Word, ...]


class Align(Line, dialect="plan", op="align"):
    """Along these axes threads take so many elements at once from where memory is aligned on, wherever rows begin; what
    lies before and behind whole vectors goes element by element.
    """

    vectors: tuple[Word, ...]


class Result(Line, dialect="plan", op="result"):
    """How a store's values leave: from registers, or through a slab of shared memory, so many columns at a time.

    `put` brings them there ("stmatrix" or "st"), `by` takes them away ("tma", or "ld" for 16 bytes a thread); `by_axes`
    is as for a stream. Rows may be points of several axes, a `box`. A slab that is `turned` has the tile's columns as
    its rows, in panels of `panel` of the tile's rows where these are longer than the widest swizzle.
    """

    references = {"agent": "agent", "rows": AXIS, "columns": AXIS, "box": AXIS}
    store: str
    agent: str
    slab: str = ""
    rows: str = ""
    columns: str = ""
    width: int = 0
    slots: int = 1
    swizzle: int = 0
    pad: int = 0
    put: str = ""
    by: str = ""
    by_axes: bool = False
    box: tuple[str, ...] = ()
    turned: bool = False
    panel: int = 0


class Limit(Line, dialect="plan", op="limit"):
    """A thread may use as many registers as leave room for so many blocks on a processor."""

    resident: int


L = TypeVar("L", bound=Line)


class Plan(Node, dialect="plan", op="plan"):
    """The decisions about one kernel, in the order they were made, and the words of the schedule nobody read yet."""

    kernel: str
    target: str
    lines: tuple[Line, ...] = ()
    open: tuple[Any, ...] = ()

    def all(self, kind: type[L]) -> tuple[L, ...]:
        """The lines of one kind."""
        known: dict[type[Line], Any] = self._kinds
        if kind not in known:
            known[kind] = tuple(x for x in self.lines if isinstance(x, kind))
        found: tuple[L, ...] = known[kind]
        return found

    @derived
    def _kinds(self) -> dict[type[Line], Any]:
        return {}

    def one(self, kind: type[L]) -> L:
        """The only line of a kind."""
        (found,) = self.all(kind)
        return found

    def named(self, name: str) -> Any:
        """The line that is called so."""
        for x in self.lines:
            if getattr(x, "name", None) == name:
                return x
        raise UserError(f"the plan of {self.kernel} has no {name}")

    def plus(self, *lines: Line, read: Any = ()) -> Plan:
        """With more decided, and words of the schedule read."""
        gone = set(read)
        return Plan(self.kernel, self.target, (*self.lines, *lines), tuple(w for w in self.open if w not in gone))

    def __str__(self) -> str:
        return "\n".join(self._text())

    def __repr__(self) -> str:
        return str(self)

    def _text(self) -> Iterator[str]:
        yield f'with plan("{self.kernel}", target="{self.target}"):'
        for x in self.lines:
            yield f"    {x}"
        for w in self.open:
            yield f"    # not read yet: {w}"
        if not self.lines and not self.open:
            yield "    pass"
