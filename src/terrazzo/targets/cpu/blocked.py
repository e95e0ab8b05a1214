"""Blocked matrix products: kernels whose reductions are all contractions.

One axis `n` that only the second factor of every contraction knows, and one axis `m` that only the first one knows, are
cut into tiles. For a block of n, the second factor is written into a panel [k][n], whatever it is: a load, a transposed
load, a guarded or converted one, a product. A tile of rows of the first factor times the panel stays in vector
registers; then the rest of the kernel (bias, activation, residual) runs over the tile. All other axes are loops around
this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.contraction import Contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Loaded, Var
from terrazzo.ir.node import Node, topological
from terrazzo.ir.sites import sites
from terrazzo.targets.terms import Scope, c_type, expression, index, term

DEPTH = 128
"""Extent of k in one panel: it stays in the first-level cache, and sums of 128 products added up round less than one
long sum."""
PANELS = 32
"""Panels whose sums are added up in order; more of them are several such sums."""
ROWS = 192
"""Extent of m in one block: the tile of results stays in the second-level cache."""


@dataclass(frozen=True)
class Site:
    """One contraction, with its factors as (over m, over n)."""

    reduce: l.Reduce
    left: Node
    right: Node


def emit(kernel: l.Kernel, scope: Scope) -> list[str] | None:
    """The body of the kernel's function, or None where the kernel is not of this form."""
    found = _sites(kernel)
    if found is None:
        return None
    sites, lets, stores, m, column = found
    return Blocked(kernel, scope, sites, lets, stores, m, column).lines()


def _sites(kernel: l.Kernel) -> tuple[list[Site], list[l.Term], list[l.Store], Var, Var] | None:
    """The contractions, the other terms and the stores of a kernel that is one chain of loops, and the axes m and n."""
    found = sites(kernel)
    if not (found.multiplies and found.one_chain and found.everywhere):
        return None
    products = list(found.contractions.values())
    kind = products[0].reduce.dtype
    if kind.name not in ("f32", "f64") or any(len(p.terms) > 1 or p.reduce.dtype is not kind for p in products):
        return None
    every = (*kernel.axes, *(a for p in products for a in p.reduce.axes))
    if not all(isinstance(a.extent, int) for a in every):
        return None
    for column in sorted(kernel.axes, key=lambda a: -_stride(kernel.stores, a, products)):
        rows = [a for a in kernel.axes if found.sides(a, column)]
        if rows:
            m = max(rows, key=extent)
            if extent(m) >= 2 and extent(column) >= 4:
                pairs = found.sides(m, column) or []
                made = [Site(p.reduce, a, b) for p, (a, b) in zip(products, pairs, strict=True)]
                return made, *_rest(n.nest(kernel)), m, column
    return None


def _rest(body: Sequence[n.Statement]) -> tuple[list[l.Term], list[l.Store]]:
    """The terms outside of reductions, and the stores, of loops in one another."""
    lets = [s.term for s in body if isinstance(s, n.Let)]
    stores = [s for s in body if isinstance(s, l.Store)]
    for s in body:
        if isinstance(s, n.Loop) and s.kind == "free":
            inner = _rest(s.body)
            lets, stores = lets + inner[0], stores + inner[1]
    return lets, stores


def _stride(stores: Sequence[l.Store], axis: Var, products: Sequence[Contraction]) -> int:
    """How good an axis is as columns: contiguous stores first, then long ones. Contiguous stores are not worth writing
    the patches of an image out as rows.
    """
    if any(_patches(f, p.reduce.axes) for p in products for f in p.factors if axis not in f.free):
        return extent(axis)
    offsets = [flatten(s.index, s.buffer.type.element_strides) for s in stores]
    contiguous = all(coefficient(o, axis) == 1 for o in offsets)
    return (1 << 40 if contiguous else 0) + extent(axis)


def _patches(factor: Node, steps: Sequence[Any]) -> bool:
    """Whether a factor has the elements of a buffer several times each."""
    if not isinstance(factor, l.Load):
        return False
    axes = {a for a in factor.free if isinstance(a, Var)} | {a for a in steps if a in factor.free}
    return _numel([a.extent for a in axes]) >= 2 * _numel(factor.buffer.type.static_shape)


class Blocked:
    def __init__(
        self,
        kernel: l.Kernel,
        scope: Scope,
        sites: list[Site],
        lets: list[l.Term],
        stores: list[l.Store],
        m: Var,
        column: Var,
    ) -> None:
        self.kernel, self.scope, self.sites, self.lets, self.stores = kernel, scope, sites, lets, stores
        self.m, self.column = m, column
        self.type = c_type(sites[0].reduce.dtype)

    def lines(self) -> list[str]:
        batch = [a for a in self.kernel.axes if a is not self.m and a is not self.column]
        m, columns = extent(self.m), extent(self.column)
        out = [f"constexpr int64_t N = tz_cols<{self.type}>(), M = {min(m, ROWS)}, K = {DEPTH};"]
        lefts, made = self.lefts()
        out += made
        heads = [f"for (int64_t {self.name(a)} = 0; {self.name(a)} < {a.extent}; {self.name(a)}++)" for a in batch]
        heads += [f"for (int64_t m0 = 0; m0 < {m}; m0 += M)", f"for (int64_t n0 = 0; n0 < {columns}; n0 += N)"]
        out.append(f"#pragma omp parallel for collapse({len(heads)}) num_threads(threads) schedule(dynamic, 1)")
        out += heads[:-1] + [heads[-1] + " {"]
        out.append(f"  const int64_t mc = std::min<int64_t>(M, {m} - m0), nc = std::min<int64_t>(N, {columns} - n0);")
        out.append(f"  alignas(64) static thread_local {self.type} panel[K * N], tile[{len(self.sites)}][M * N];")
        if any(depth(site) > DEPTH * PANELS for site in self.sites):
            out.append(f"  alignas(64) static thread_local {self.type} part[M * N];")
        for k, site in enumerate(self.sites):
            out += ["  " + x for x in self.product(k, site, self.start(site, lefts))]
        out += ["  " + x for x in self.epilogue()]
        out.append("}")
        out += [f"free({name});" for name in lefts.values()]
        return out

    def name(self, axis: Any) -> str:
        if axis not in self.scope.names:
            self.scope.names[axis] = self.scope.fresh("i")
        return self.scope.names[axis]

    def lefts(self) -> tuple[dict[Node, str], list[str]]:
        """The first factors that cannot be read in place, by the names under which they are written out, and how."""
        lefts: dict[Node, str] = {}
        out: list[str] = []
        for site in self.sites:
            if _direct(site, self.m) is None and site.left not in lefts:
                lefts[site.left] = name = f"left{len(lefts)}"
                out += self.materialised(site, name)
        return lefts, out

    def start(self, site: Site, lefts: Mapping[Node, str]) -> str:
        """Where the first factor begins at row m0 and step k0, and its strides along rows and steps."""
        if site.left in lefts:
            return f"{lefts[site.left]} + ({self.row(site, 'm0')}) * {depth(site)} + k0, {depth(site)}, 1"
        direct = _direct(site, self.m)
        assert direct is not None
        load, am, ak = direct
        inner = self.scope.inner()
        inner.names.update(dict.fromkeys(site.reduce.axes, "0"))
        inner.names[self.m] = "m0"
        place = index(flatten(load.index, load.buffer.type.element_strides), inner)
        along_m, along_k = index(am, self.scope), index(ak, self.scope)
        return f"{self.scope.buffers[load.buffer]} + {place} + k0 * {along_k}, {along_m}, {along_k}"

    def product(self, k: int, site: Site, start: str) -> list[str]:
        """tile[k] = the product, one panel of depth K after the other; of many panels, the sum of sums of some. The
        first factor begins at `start`.
        """
        steps = depth(site)
        out = [
            f"for (int64_t k0 = 0; k0 < {steps}; k0 += K) {{",
            f"  const int64_t kc = std::min<int64_t>(K, {steps} - k0);",
        ]
        out += ["  " + x for x in self.panel(site)]
        if steps <= DEPTH * PANELS:
            out.append(f"  tz_rows<{self.type}>({start}, panel, kc, tile[{k}], mc, k0 == 0);")
        else:
            before = f"(k0 < {PANELS} * K ? 0 : tile[{k}][x])"
            out += [
                f"  tz_rows<{self.type}>({start}, panel, kc, part, mc, k0 % ({PANELS} * K) == 0);",
                f"  if ((k0 / K + 1) % {PANELS} == 0 || k0 + K >= {steps})",
                f"    for (int64_t x = 0; x < mc * N; x++) tile[{k}][x] = {before} + part[x];",
            ]
        out.append("}")
        if steps == 0:
            out.append(f"for (int64_t x = 0; x < M * N; x++) tile[{k}][x] = 0;")
        return out

    def panel(self, site: Site) -> list[str]:
        """The second factor at [k0 + k][n0 + j], into panel[k][j]; 0 beyond the last column."""
        load = operand(site.right)
        if isinstance(load, l.Load) and not load.inside and not _gathers(load):
            offset = flatten(load.index, load.buffer.type.element_strides)
            along_n = coefficient(offset, self.column)
            along_k = _flat_stride(offset, site.reduce.axes)
            inner = self.scope.inner()
            inner.names.update(dict.fromkeys(site.reduce.axes, "0"))
            inner.names[self.column] = "n0"
            if along_k is not None and isinstance(along_n, int) and (along_n == 1 or along_k == 1):
                start = f"{self.scope.buffers[load.buffer]} + {index(offset, inner)} + k0 * {index(along_k, inner)}"
                kind, stride = ("rows", along_k) if along_n == 1 else ("transposed", along_n)
                return [f"tz_pack_{kind}<{self.type}>({start}, {index(stride, inner)}, panel, kc, nc);"]
        inner = self.scope.inner()
        out = ["for (int64_t k = 0; k < kc; k++) {", *("  " + x for x in _digits("k0 + k", site.reduce.axes, inner))]
        inner.names[self.column] = "(n0 + j)"
        body = _computed(site.right, inner)
        out += [
            "  for (int64_t j = 0; j < nc; j++) {",
            *("    " + x for x in body[:-1]),
            f"    panel[k * N + j] = {body[-1]};",
            "  }",
        ]
        return [*out, "  for (int64_t j = nc; j < N; j++) panel[k * N + j] = 0;", "}"]

    def row(self, site: Site, m: str) -> str:
        """The row of a materialised first factor, counting the axes it depends on."""
        text = ""
        for a in self.row_axes(site):
            name = m if a is self.m else self.name(a)
            text = f"({text}) * {a.extent} + {name}" if text else name
        return text

    def row_axes(self, site: Site) -> list[Var]:
        """The axes a materialised first factor depends on; m last, so that its rows lie one behind the other."""
        return [a for a in self.kernel.axes if a in site.left.free and a is not self.m] + [self.m]

    def materialised(self, site: Site, name: str) -> list[str]:
        """The first factor, computed once into [axes it depends on][k], where it is no plain load of rows."""
        axes = self.row_axes(site)
        steps = depth(site)
        rows = _numel([a.extent for a in axes])
        inner = self.scope.inner()
        size = f"(sizeof({self.type}) * {rows * steps} + 127) / 64 * 64"
        out = [f"{self.type}* {name} = ({self.type}*)aligned_alloc(64, {size});"]
        out += ["#pragma omp parallel for num_threads(threads)", f"for (int64_t row = 0; row < {rows}; row++) {{"]
        out += ["  " + x for x in _digits("row", axes, inner)]
        out += [
            f"  for (int64_t k = 0; k < {steps}; k++) {{",
            *("    " + x for x in _digits("k", site.reduce.axes, inner)),
        ]
        body = _computed(site.left, inner)
        return [*out, *("    " + x for x in body[:-1]), f"    {name}[row * {steps} + k] = {body[-1]};", "  }", "}"]

    def epilogue(self) -> list[str]:
        """The rest of the kernel, over the tile."""
        inner = self.scope.inner()
        inner.names[self.m], inner.names[self.column] = "m", "j_"
        for k, site in enumerate(self.sites):
            inner.names[site.reduce] = f"tile[{k}][(m - m0) * N + j_ - n0]"
        simd = not any(
            isinstance(x, Loaded)
            for t in self.lets
            for c in t.children
            if isinstance(c, Expr)
            for x in topological([c])
        )
        out = ["for (int64_t m = m0; m < m0 + mc; m++) {", *(["  #pragma omp simd"] if simd else [])]
        out.append("  for (int64_t j_ = n0; j_ < n0 + nc; j_++) {")
        for x in self.lets:
            text = expression(x, inner)
            inner.names[x] = inner.fresh("in" if isinstance(x, l.Load) else "v")
            out.append(f"    const {c_type(x.dtype)} {inner.names[x]} = {text};")
        for s in self.stores:
            place = index(flatten(s.index, s.buffer.type.element_strides), inner)
            out.append(f"    {inner.buffers[s.buffer]}[{place}] = {term(s.value, inner)};")
        return [*out, "  }", "}"]


def _direct(site: Site, m: Var) -> tuple[l.Load, IntExpr, IntExpr] | None:
    """The first factor as (load, stride along m, stride along k), where it can be read in place."""
    load = site.left
    if not isinstance(load, l.Load) or load.inside or _gathers(load):
        return None
    offset = flatten(load.index, load.buffer.type.element_strides)
    along_m, along_k = coefficient(offset, m), _flat_stride(offset, site.reduce.axes)
    return (load, along_m, along_k) if along_m is not None and along_k is not None else None


def _flat_stride(offset: IntExpr, axes: Sequence[Any]) -> IntExpr | None:
    """The stride of the flattened reduce axes, where they lie one behind the other in memory."""
    stride: IntExpr | None = None
    for a in reversed(axes):
        own = coefficient(offset, a)
        if own is None or (stride is not None and own != stride):
            return None
        stride = own * a.extent
    return coefficient(offset, axes[-1])


def _digits(flat: str, axes: Sequence[Any], scope: Scope) -> list[str]:
    """Declarations that take a row-major count apart into variables."""
    out, rest = [], flat
    sizes = [_numel([b.extent for b in axes[k + 1 :]]) for k in range(len(axes))]
    for k, (a, size) in enumerate(zip(axes, sizes, strict=True)):
        scope.names[a] = scope.fresh("i")
        digit = f"({rest}) / {size}" if size != 1 else f"({rest})"
        out.append(f"const int64_t {scope.names[a]} = {digit}{f' % {a.extent}' if k else ''};")
    return out


def _computed(x: Node, scope: Scope) -> list[str]:
    """Declarations for everything below `x`, then `x` itself as an expression."""
    out = []
    for node in topological([x]):
        if isinstance(node, l.Term) and node is not x and not isinstance(node, l.Literal) and node not in scope.names:
            text = expression(node, scope)
            scope.names[node] = scope.fresh("v")
            out.append(f"const {c_type(node.dtype)} {scope.names[node]} = {text};")
    return [*out, expression(x, scope)]


def _gathers(load: l.Load) -> bool:
    return any(isinstance(x, Loaded) for x in topological([e for e in load.index if isinstance(e, Expr)]))


def depth(site: Site) -> int:
    """How many products are added up."""
    return _numel([a.extent for a in site.reduce.axes])


def extent(axis: Var) -> int:
    """The extent of an axis, which is known here."""
    assert isinstance(axis.extent, int)
    return axis.extent


def _numel(extents: Sequence[Any]) -> int:
    total = 1
    for e in extents:
        total *= int(e)
    return total
