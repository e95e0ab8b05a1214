"""Blocked matrix products: kernels whose reductions are all contractions.

The axes that only the first factor of every contraction knows are its rows, counted in one; those that only the second
one knows are its columns. Rows and columns are cut into tiles. For a block of columns, the second factor is written
into a panel [k][column], whatever it is: a load, a transposed load, a guarded or converted one, a product. A tile of
rows of the first factor times the panel stays in vector registers; then the rest of the kernel (bias, activation,
residual) runs over the tile. All other axes are loops around this.

What is read out of place, as the windows of an image, is written in runs (runs.py): the rows of a block before several
of its panels, or, where it is small, all of it once; or it is an image with a border, whose windows are not written at
all (images.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.contraction import operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, Loaded
from terrazzo.ir.node import Node, topological
from terrazzo.rules.loop_to_tile.walked.collapse import digits_apart
from terrazzo.targets.cpu.merged import free_merged
from terrazzo.targets.cpu.phases import phases
from terrazzo.targets.cpu.runs import digits, written
from terrazzo.targets.cpu.tiles import (
    COLUMNS,
    FEW,
    PACKED,
    ROWS,
    TILE,
    Site,
    Tiled,
    by_rows,
    depth,
    direct,
    flat,
    kept,
    numel,
    packed,
    plain,
    tiled,
)
from terrazzo.targets.terms import Scope, c_type, expression, index, term

DEPTH = 128
"""Extent of k in one panel: it stays in the first-level cache, and sums of 128 products added up round less than one
long sum."""
PANELS = 32
"""Panels whose sums are added up in order; more of them are several such sums."""
BLOCKS = 32
"""Blocks that many threads can share."""
PANEL = 32
"""Columns of a panel, at most."""
OWN = 1 << 17
"""Numbers of an image that a thread may have for itself: they stay in its second-level cache."""
BEYOND = 512
"""Numbers behind an image: the last columns are read in whole vectors."""
LINE = 1 << 12
"""Columns of an image that are one row of a tile: it stays in the first-level cache, and bounds are known."""
STACK = 1 << 17
"""Numbers of a tile that may be on the stack of a thread."""


def emit(kernel: l.Kernel, scope: Scope) -> list[str] | None:
    """The body of the kernel's function, or None where the kernel is not of this form."""
    kernel = free_merged(digits_apart(phases(kernel)))
    found = tiled(kernel)
    if found is None:
        return None
    lets, stores = _rest(n.nest(kernel))
    return Blocked(kernel, scope, found, lets, stores).lines()


def _rest(body: Sequence[n.Statement]) -> tuple[list[l.Term], list[l.Store]]:
    """The terms outside of reductions, and the stores, of loops in one another."""
    lets = [s.term for s in body if isinstance(s, n.Let)]
    stores = [s for s in body if isinstance(s, l.Store)]
    for s in body:
        if isinstance(s, n.Loop) and s.kind == "free":
            inner = _rest(s.body)
            lets, stores = lets + inner[0], stores + inner[1]
    return lets, stores


class Blocked:
    """Writes the loops of a kernel's tiles: of all its sums of products, or, for others, one after the other."""

    def __init__(
        self,
        kernel: l.Kernel,
        scope: Scope,
        way: Tiled,
        lets: Sequence[l.Term],
        stores: Sequence[l.Store],
        alone: bool = True,
    ) -> None:
        self.kernel, self.scope, self.way, self.lets, self.stores = kernel, scope, way, lets, stores
        self.sites, self.rows, self.columns = way.sites, way.rows, way.columns
        self.type = c_type(way.sites[0].reduce.dtype)
        self.once = False  # whether all columns are a row of one tile
        self.packed = [s for s in way.sites if alone and packed(s, way)]

    def lines(self) -> list[str]:
        batch = [a for a in self.kernel.axes if a not in self.rows and a not in self.columns]
        m, columns = numel(self.rows), self.way.count
        own = self.way.image is not None and self.in_parts(batch)
        self.once = own and self.in_lines() and columns <= LINE
        block, group = self.sizes(numel(batch))
        out = [f"constexpr int64_t N = tz_cols<{self.type}>(), M = {block}, K = {DEPTH}, G = {group};"]
        lefts, made = self.lefts()
        rights, kept = self.images(own) if self.way.image else self.rights()
        out += [*made, *kept]
        heads = [f"for (int64_t {self.name(a)} = 0; {self.name(a)} < {a.extent}; {self.name(a)}++)" for a in batch]
        tiles = [f"for (int64_t m0 = 0; m0 < {m}; m0 += M)", f"for (int64_t g0 = 0; g0 < {columns}; g0 += G * N) {{"]
        each = self.own_image() if own else []
        spread = len(heads) if each else len(heads) + len(tiles)
        out.append(f"#pragma omp parallel for collapse({spread}) num_threads(threads) schedule(dynamic, 1)")
        out += [*heads[:-1], heads[-1] + " {", *each, *tiles] if each else [*heads, *tiles]
        out.append(
            f"  const int64_t mc = std::min<int64_t>(M, {m} - m0), g1 = std::min<int64_t>(g0 + G * N, {columns});"
        )
        memory = f"  alignas(64) {self.type}"  # of the stack, which all kernels share, where it has room
        wide = COLUMNS if self.packed else PANEL
        if len(self.sites) * block * wide > STACK:
            memory = memory.replace("alignas(64)", "alignas(64) static thread_local")
        out.append(f"{memory} panel[K * N], tile[{len(self.sites)}][G * M * N];")
        if self.packed:
            out.append(f"{memory} rows[M * K];")
        if any(depth(site) > DEPTH * PANELS for site in self.sites):
            out.append(f"{memory} part[G * M * N];")
        for k, site in enumerate(self.sites):
            out += ["  " + x for x in self.product(k, site, self.start(site, lefts), rights.get(site.right, ""))]
        panels = (
            ["{", "  const int64_t n0 = g0, nc = g1 - g0, at = 0;"] if self.in_lines() else self.each_panel(columns)
        )
        out += ["  " + x for x in [*panels, *("  " + x for x in self.epilogue()), "}"]]
        out += ["}"] * (2 if each else 1)
        out += [f"free({name});" for name in (*lefts.values(), *rights.values())]
        return out

    def sizes(self, around: int) -> tuple[int, str]:
        """Rows of a block, and panels that share them: as many as fit, and fewer where there would be few blocks."""
        m, columns = numel(self.rows), self.way.count
        if self.once:
            return m, f"({columns} + N - 1) / N"
        most, group = (PACKED, COLUMNS) if self.packed else (ROWS, COLUMNS if self.way.image and m <= FEW else 1)
        block = m if m <= most else -(-m // -(-m // most) // TILE) * TILE  # of even sizes

        def blocks() -> int:
            return around * -(-m // block) * -(-columns // max(group, PANEL))

        while blocks() < BLOCKS and (block > 48 or group > 64):
            if block > 48:
                block = -(-block // (2 * TILE)) * TILE
            else:
                group //= 2
        return block, f"std::max<int64_t>({group} / N, 1)" if group > 1 else "1"

    def each_panel(self, columns: int) -> list[str]:
        """A loop over the panels of a group."""
        return [
            "for (int64_t n0 = g0; n0 < g1; n0 += N) {",
            f"  const int64_t nc = std::min<int64_t>(N, {columns} - n0), at = (n0 - g0) / N * M * N;",
        ]

    def name(self, axis: Any) -> str:
        if axis not in self.scope.names:
            self.scope.names[axis] = self.scope.fresh("i")
        return self.scope.names[axis]

    def lefts(self) -> tuple[dict[Node, str], list[str]]:
        """The first factors that are written whole, by the names under which they are, and how."""
        lefts: dict[Node, str] = {}
        out: list[str] = []
        for site in self.sites:
            if direct(site, self.rows) is None and site not in self.packed and site.left not in lefts:
                lefts[site.left] = name = f"left{len(lefts)}"
                out += self.materialised(site, name)
        return lefts, out

    def rights(self) -> tuple[dict[Node, str], list[str]]:
        """The second factors whose panels are written once, by the names under which they are, and how."""
        rights: dict[Node, str] = {}
        out: list[str] = []
        for site in self.sites:
            if not kept(site, self.way) or site.right in rights:
                continue
            rights[site.right] = name = f"right{len(rights)}"
            around, columns, steps = self.around(site.right), numel(self.columns), depth(site)
            inner = self.scope.inner()
            panels = f"({columns} + N - 1) / N"
            out += [
                f"{self.type}* {name} = ({self.type}*)aligned_alloc(64, (sizeof({self.type}) * N * {steps} * "
                f"{numel(around)} * ({panels}) + 63) / 64 * 64);",
                "#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)",
                f"for (int64_t q = 0; q < {numel(around)} * ({panels}); q++) {{",
                f"  const int64_t b = q / ({panels}), n0 = q % ({panels}) * N;",
                f"  const int64_t nc = std::min<int64_t>(N, {columns} - n0);",
                *("  " + x for x in digits("b", around, inner)),
                *("  " + x for x in self.panel(site, f"({name} + q * N * {steps})", "0", str(steps), inner)),
                "}",
            ]
        return rights, out

    def in_lines(self) -> bool:
        """Whether there is one row, which goes along several panels at once."""
        return self.way.image is not None and numel(self.rows) == 1 and depth(self.sites[0]) <= DEPTH * PANELS

    def in_parts(self, batch: Sequence[Any]) -> bool:
        """Whether images are written for one value of the axes around a block at a time: where these are many, a thread
        reads what it wrote while that is in its cache.
        """
        image = self.way.image
        small = image is not None and image.size <= OWN
        return small and numel(batch) >= BLOCKS and batch == self.around(self.sites[0].right)

    def images(self, own: bool) -> tuple[dict[Node, str], list[str]]:
        """Where the steps of images begin; and the images of the second factor, unless each thread writes its own."""
        image, (site,) = self.way.image, self.sites
        assert image is not None
        out = [
            f"int64_t* steps = (int64_t*)aligned_alloc(64, {-(-depth(site) // 8) * 64});",
            *image.steps(site.steps, "steps", self.scope),
        ]
        if own:
            return {site.reduce: "steps"}, out
        around, inner = self.around(site.right), self.scope.inner()
        size = f"sizeof({self.type}) * ({image.size * numel(around)} + {BEYOND})"
        return {site.right: "image", site.reduce: "steps"}, [
            *out,
            f"{self.type}* image = ({self.type}*)aligned_alloc(64, ({size} + 63) / 64 * 64);",
            "#pragma omp parallel for num_threads(threads)",
            f"for (int64_t q = 0; q < {numel(around)}; q++) {{",
            *("  " + x for x in digits("q", around, inner)),
            *("  " + x for x in image.filling(f"(image + q * {image.size})", inner)),
            "}",
        ]

    def own_image(self) -> list[str]:
        """The images at one value of the axes around a block."""
        image = self.way.image
        assert image is not None
        lines = [
            f"alignas(64) static thread_local {self.type} image[{image.size} + {BEYOND}];",
            *image.filling("image", self.scope, zeros=True),
        ]
        return ["  " + x for x in lines]

    def around(self, x: Node) -> list[Any]:
        """The axes around a block that a factor knows."""
        return [a for a in self.kernel.axes if a in x.free and a not in self.rows and a not in self.columns]

    def start(self, site: Site, lefts: Mapping[Node, str]) -> str:
        """Where the first factor begins at row m0 and step k0, and its strides along rows and steps."""
        if site in self.packed:
            return "rows, 1, M" if by_rows(site, self.way) else "rows, K, 1"
        if site.left in lefts:
            return f"{lefts[site.left]} + ({self.row(site, 'm0')}) * {depth(site)} + k0, {depth(site)}, 1"
        in_place = direct(site, self.rows)
        assert in_place is not None
        one, am, ak = in_place
        inner = self.scope.inner()
        inner.names.update(dict.fromkeys((*site.steps, *self.rows), "0"))
        place = index(flatten(one.index, one.buffer.type.element_strides), inner)
        along_m, along_k = index(am, self.scope), index(ak, self.scope)
        return f"{self.scope.buffers[one.buffer]} + {place} + m0 * {along_m} + k0 * {along_k}, {along_m}, {along_k}"

    def product(self, k: int, site: Site, start: str, right: str = "") -> list[str]:
        """tile[k] = the product, one panel of depth K after the other; of many panels, the sum of sums of some. The
        first factor begins at `start`; `right` has the panels, where they are written already.
        """
        steps, columns, image = depth(site), self.way.count, self.way.image
        if steps == 0:
            return [f"for (int64_t x = 0; x < G * M * N; x++) tile[{k}][x] = 0;"]
        if image:
            begins = f"image + ({self.place(site.right)}) * {image.size}" if right else "image"
            windows = f"tz_image<{self.type}>{{{begins} + {'g0' if self.in_lines() else 'n0'}, steps + k0}}"
            few = numel(self.rows) <= FEW
            panel = windows if few else "panel"
            out = [] if few else [f"tz_pack_image<{self.type}>({windows}, panel, kc);"]
        elif right:
            place = self.place(site.right)
            panels = f"(({columns} + N - 1) / N)"
            panel = f"{right} + ((({place}) * {panels} + n0 / N) * {steps} + k0) * N"
            out = []
        else:
            panel = "panel"
            out = self.panel(site, "panel", "k0", "kc", self.scope)
        if steps <= DEPTH * PANELS:
            out.append(f"tz_rows<{self.type}, {columns}>({start}, {panel}, kc, tile[{k}] + at, mc, k0 == 0);")
        else:
            before = f"(k0 < {PANELS} * K ? 0 : tile[{k}][at + x])"
            out += [
                f"tz_rows<{self.type}, {columns}>({start}, {panel}, kc, part + at, mc, k0 % ({PANELS} * K) == 0);",
                f"if ((k0 / K + 1) % {PANELS} == 0 || k0 + K >= {steps})",
                f"  for (int64_t x = 0; x < mc * N; x++) tile[{k}][at + x] = {before} + part[at + x];",
            ]
        if self.in_lines():
            out = [f"tz_line<{self.type}>({start}, {panel}, kc, tile[{k}], g1 - g0, k0 == 0);"]
        else:
            out = [*self.each_panel(columns), *("  " + x for x in out), "}"]
        if site in self.packed:
            out = [*self.rows_packed(site), *out]
        head = f"for (int64_t k0 = 0; k0 < {steps}; k0 += K) {{"
        return [head, f"  const int64_t kc = std::min<int64_t>(K, {steps} - k0);", *("  " + x for x in out), "}"]

    def rows_packed(self, site: Site) -> list[str]:
        """The first factor at rows from m0 and steps from k0 on, into rows[m][k] or rows[k][m]."""
        if by_rows(site, self.way):
            return written(site.left, site.steps, self.rows, ("k0", "kc", "m0", "mc"), ("rows", "M", "1"), self.scope)
        return written(site.left, self.rows, site.steps, ("m0", "mc", "k0", "kc"), ("rows", "K", "1"), self.scope)

    def panel(self, site: Site, panel: str, k0: str, kc: str, scope: Scope) -> list[str]:
        """The second factor at [k0 + k][n0 + j], into panel[k][j]; 0 beyond the last column."""
        one = operand(site.right)
        if plain(one):
            assert isinstance(one, l.Load)
            along_n, along_k = flat(one, self.columns), flat(one, site.steps)
            if along_k is not None and isinstance(along_n, int) and (along_n == 1 or along_k == 1):
                inner = scope.inner()
                inner.names.update(dict.fromkeys((*site.steps, *self.columns), "0"))
                place = index(flatten(one.index, one.buffer.type.element_strides), inner)
                start = f"{scope.buffers[one.buffer]} + {place} + {k0} * {index(along_k, inner)} + n0 * {along_n}"
                kind, by = ("rows", along_k) if along_n == 1 else ("transposed", along_n)
                return [f"tz_pack_{kind}<{self.type}>({start}, {index(by, inner)}, {panel}, {kc}, nc);"]
        return [
            f"if (nc < N) std::fill_n({panel}, {kc} * N, 0);",
            *written(site.right, site.steps, self.columns, (k0, kc, "n0", "nc"), (panel, "N", "1"), scope),
        ]

    def place(self, x: Node) -> str:
        """Counts what a factor is at the values of the axes around a block."""
        text = ""
        for a in self.around(x):
            text = f"({text}) * {a.extent} + {self.name(a)}" if text else self.name(a)
        return text or "0"

    def row(self, site: Site, m: str) -> str:
        """The row of a first factor that is written whole, counting the axes it depends on."""
        place = self.place(site.left)
        return m if place == "0" else f"({place}) * {numel(self.rows)} + {m}"

    def materialised(self, site: Site, name: str) -> list[str]:
        """The first factor, computed once into [axes it depends on][k], where it is no plain load of rows."""
        axes, steps = [*self.around(site.left), *self.rows], depth(site)
        size = f"(sizeof({self.type}) * {numel(axes) * steps} + 127) / 64 * 64"
        span, to = ("row", "1", "0", str(steps)), (f"({name} + row * {steps})", "0", "1")
        return [
            f"{self.type}* {name} = ({self.type}*)aligned_alloc(64, {size});",
            "#pragma omp parallel for num_threads(threads)",
            f"for (int64_t row = 0; row < {numel(axes)}; row++) {{",
            *("  " + x for x in written(site.left, axes, site.steps, span, to, self.scope)),
            "}",
        ]

    def epilogue(self) -> list[str]:
        """The rest of the kernel, over the tile, along its columns; or along its rows, where results lie so."""
        inner = self.scope.inner()
        for k, site in enumerate(self.sites):
            inner.names[site.reduce] = f"tile[{k}][at + i * N + j]"
        if self.once:
            return self.all_points(inner)
        vector = self.vector()
        if self.by_rows():
            head = ["for (int64_t j = 0; j < nc; j++) {", *("  " + x for x in digits("n0 + j", self.columns, inner))]
            head += ["  " + x for x in self.same(self.rows, inner)]
            inner.names[self.rows[-1]] = inner.fresh("i")
            column = inner.fresh("column")  # a run of its own: GCC has no vectors of steps across it beside 16-bit runs
            copied = [f"{column}[{k}][i] = {inner.names[site.reduce]};" for k, site in enumerate(self.sites)]
            inner.names |= {site.reduce: f"{column}[{k}][i]" for k, site in enumerate(self.sites)}
            body = [f"const int64_t {inner.names[self.rows[-1]]} = m0 + i;", *self.point(inner)]
            rows = "for (int64_t i = 0; i < mc; i++)"
            loops = [f"alignas(64) {self.type} {column}[{len(self.sites)}][M];", f"{rows} {{ {' '.join(copied)} }}"]
            loops += [*vector, f"{rows} {{", *("  " + x for x in body), "}"]
            return [*head, *("  " + x for x in loops), "}"]
        head = ["for (int64_t i = 0; i < mc; i++) {", *("  " + x for x in digits("m0 + i", self.rows, inner))]
        head += ["  " + x for x in self.same(self.columns, inner)]
        within, first, extent, beyond = self.columns_of(inner)
        inner.names[self.columns[-1]] = inner.fresh("i")
        body = [f"const int64_t {inner.names[self.columns[-1]]} = {first} + j - j0;", *self.point(inner)]
        return [
            *head,
            "  for (int64_t j0 = 0, j1; j0 < nc; j0 = j1) {",
            *("    " + x for x in within),
            f"    j1 = std::min<int64_t>(nc, j0 + {extent} - ({first}));",
            *("    " + x for x in (*beyond, *vector)),
            f"    for (int64_t j = j0; j < {'end' if beyond else 'j1'}; j++) {{",
            *("      " + x for x in body),
            "    }",
            "  }",
            "}",
        ]

    def vector(self) -> list[str]:
        """What goes before the innermost loop of the rest of the kernel."""
        places = [c for t in self.lets for c in t.children if isinstance(c, Expr)]
        return [] if any(isinstance(x, Loaded) for x in topological(places)) else ["#pragma omp simd"]

    def all_points(self, scope: Scope) -> list[str]:
        """The rest of the kernel over all columns of an image, of which the tile has one row."""
        image = self.way.image
        assert image is not None
        scope.names.update(dict.fromkeys(self.rows, "0"))
        scope.names.update({a: scope.fresh("i") for a in self.columns})
        names = [scope.names[a] for a in self.columns]
        place = " + ".join(f"{x} * {p}" for x, p in zip(names, image.pitches, strict=True))
        scope.names[self.sites[0].reduce] = f"tile[0][{place}]"
        heads = [
            f"for (int64_t {scope.names[a]} = 0; {scope.names[a]} < {a.extent}; {scope.names[a]}++) {{"
            for a in self.columns
        ]
        return [*heads[:-1], *self.vector(), heads[-1], *("  " + x for x in self.point(scope)), *("}" for _ in heads)]

    def by_rows(self) -> bool:
        """Whether results lie along the rows of a tile: a column of them apart, their places meet in the cache."""
        if len(self.rows) != 1 or self.way.image is not None:
            return False
        offsets = [flatten(s.index, s.buffer.type.element_strides) for s in self.stores]
        along = [(coefficient(o, self.rows[0]), coefficient(o, self.columns[-1])) for o in offsets]
        return all(row == 1 and column != 1 for row, column in along)

    def same(self, axes: Sequence[Any], scope: Scope) -> list[str]:
        """What is the same along some axes, before the loop over them: compilers that cannot tell what results may
        overlap compute it at each step.
        """
        return self.computed([x for x in self.lets if x.free.isdisjoint(axes)], scope)

    def computed(self, terms: Sequence[l.Term], scope: Scope) -> list[str]:
        """Declarations of terms that have no names yet."""
        out = []
        for x in terms:
            if x in scope.names:
                continue
            text = expression(x, scope)
            scope.names[x] = scope.fresh("in" if isinstance(x, l.Load) else "v")
            out.append(f"const {c_type(x.dtype)} {scope.names[x]} = {text};")
        return out

    def point(self, scope: Scope) -> list[str]:
        """The rest of the kernel at one point of the tile."""
        out = self.computed(self.lets, scope)
        for s in self.stores:
            place = index(flatten(s.index, s.buffer.type.element_strides), scope)
            out.append(f"{scope.buffers[s.buffer]}[{place}] = {term(s.value, scope)};")
        return out

    def columns_of(self, scope: Scope) -> tuple[list[str], str, int, list[str]]:
        """Of a run of columns from n0 + j0 on: declarations of where it begins along each axis, the name of that along
        the last, how long that one is, and what says where its columns end, if that is sooner.
        """
        last = self.columns[-1]
        if self.way.image is None:
            within = digits("n0 + j0", self.columns, scope) if len(self.columns) > 1 else []
            return within, scope.names[last] if within else "n0 + j0", int(last.extent), []
        points = self.way.image.points
        within = digits("n0 + j0", points, scope)
        scope.names.update({a: scope.names[p] for a, p in zip(self.columns, points, strict=True)})
        outside = " || ".join(f"{scope.names[a]} >= {a.extent}" for a in self.columns[:-1])
        first = scope.names[last]
        end = f"const int64_t end = std::min<int64_t>(j1, j0 + {last.extent} - {first});"
        return within, first, self.way.image.dims[-1].size, [*([f"if ({outside}) continue;"] if outside else []), end]
