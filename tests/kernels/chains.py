"""Two products in one loop of steps under pinned schedules, as text of Tile IR: what lies between them, and how it is
bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Chain:
    """`o[h, m, n] = sum over k of f(sum over d of q[h, m, d] * key[h, k, d]) * value[h, k, n]`, and how it is bound.

    `between` is what f is: "relu", or a "softmax", which divides by the sum of weights; a row of "causal" sees keys up
    to its own, one of "window" the last 80 of these, one of "later" those from its own on. `shape` has m, k, d and n.
    On `mma`, warps divide m and k as `warps` says, each with `each` times 16 rows, and `by` brings a step's `step`
    keys; on `wgmma`, `groups` warpgroups divide m, behind a warp that loads, and steps may `overlap`. Keys are stored
    as rows, or turned. `stay` blocks walk all tiles, `together` heads at a time; queries have `held` slots. Threads
    that load and that multiply have so many `registers`. Keys are `across` the first instruction ("n", its columns) or
    down it ("m", its rows), and weights the `second` one's first factor ("a") or second one ("b"); the second product
    may be on something else (`then`). Weights lie where `weights` says. Warps may divide rows and columns of the second
    product otherwise (`apart`) than rows and keys of the first.
    """

    shape: tuple[int, int, int, int] = (64, 128, 64, 64)
    between: str = "softmax"
    on: str = "mma"
    target: str = "sm_80"
    dtype: str = "bf16"
    heads: int = 2
    step: int = 32
    ring: int = 2
    by: str = "cp.async"
    warps: tuple[int, int] = (2, 1)
    each: int = 1
    groups: int = 1
    deep: int = 16
    turned: bool = False
    roles: bool = False
    grid: int = 1
    overlap: bool = False
    stay: int = 0
    together: int = 0
    held: int = 1
    registers: tuple[int, int] | None = None
    across: str = "n"
    second: str = "a"
    then: str = ""
    weights: str = ""
    apart: tuple[int, int] | None = None

    @property
    def groups_multiply(self) -> bool:
        """Whether warpgroups do."""
        return "wgmma" in (self.on, self.then)

    @property
    def rows(self) -> int:
        few = (self.across, self.second) == ("m", "b")  # rows are columns of both instructions
        return 64 * self.groups if self.groups_multiply else (8 if few else 16) * self.each * self.warps[0]

    @property
    def text(self) -> str:
        """A program of this kernel and its schedule."""
        m, k, d, n = self.shape
        key = f"{d}, {k}" if self.turned else f"{k}, {d}"
        h, t = self.heads, self.dtype
        ends = self.relu() if self.between == "relu" else self.softmax()
        lines = [
            "@tile",
            f"def f(q: {t}[{h}, {m}, {d}], key: {t}[{h}, {key}], v: {t}[{h}, {k}, {n}]):",
            f"    with kernel('o', o={t}[{h}, {m}, {n}]):",
            f"        for a0 in free({h}):",
            f"            for a1 in free({m}):",
            *("                " + line for line in ends),
            *("    " + line for line in self.schedule()),
            "    return (o,)",
            "",
        ]
        return "\n".join(lines)

    def score(self, axis: str, name: str, scale: str = "0.25") -> list[str]:
        """The inner product, and what it is worth: `s`."""
        key = f"key[a0, r0, {axis}]" if self.turned else f"key[a0, {axis}, r0]"
        lines = [
            f"    for r0 in reduce({self.shape[2]}):",
            f"        {name} <- sum(mul(f32(q[a0, a1, r0]), f32({key})))",
            f"    s_{name} = mul({name}, f32({scale}))",
        ]
        seen = {
            "causal": f"le(index({axis}), index(a1))",
            "window": f"and_(gt(index({axis}), sub(index(a1), i64(80))), le(index({axis}), index(a1)))",
            "later": f"ge(index({axis}), index(a1))",
        }.get(self.between)
        if seen:
            lines += [f"    m_{name} = where({seen}, s_{name}, f32(-inf))"]
        return lines

    def relu(self) -> list[str]:
        k, n = self.shape[1], self.shape[3]
        return [
            f"for a2 in free({n}):",
            f"    for r1 in reduce({k}):",
            *("    " + line for line in self.score("r1", "acc0")),
            f"        w = f32({self.dtype}(max(s_acc0, f32(0.0))))",
            "        acc1 <- sum(mul(w, f32(v[a0, r1, a2])))",
            f"    o[a0, a1, a2] = {self.dtype}(acc1)",
        ]

    def softmax(self) -> list[str]:
        k, n = self.shape[1], self.shape[3]
        s = "s" if self.between == "softmax" else "m"
        return [
            f"for r1 in reduce({k}):",
            *self.score("r1", "acc0"),
            f"    acc1 <- max({s}_acc0)",
            f"for r2 in reduce({k}):",
            *self.score("r2", "acc2"),
            f"    acc3 <- sum(approx_exp2(sub({s}_acc2, acc1)))",
            f"for a2 in free({n}):",
            f"    for r2 in reduce({k}):",
            *("    " + line for line in self.score("r2", "acc4")),
            f"        w = f32({self.dtype}(approx_exp2(sub({s}_acc4, acc1))))",
            "        acc5 <- sum(mul(w, f32(v[a0, r2, a2])))",
            f"    o[a0, a1, a2] = {self.dtype}(approx_div(acc5, acc3))",
        ]

    def schedule(self) -> list[str]:
        """The lines of the schedule."""
        m, k, d, n = self.shape
        inner, outer, steps = ("acc1", "acc0", "r1") if self.between == "relu" else ("acc3", "acc4", "r2")
        times = -(-k // (self.step * self.grid))
        count = f"grid({self.grid}) * " if self.grid > 1 else ""
        early = ", overlap=1" if self.overlap else ""
        lines = [
            f'with schedule("o", target="{self.target}"):',
            f"    a0 = grid({self.heads})",
            f"    a1 = grid({-(-m // self.rows)}) * block({self.rows})",
            f"    a2 = block({n})",
            f"    {steps} = {count}time({times}, ring={self.ring}{early}) * block({self.step})",
        ]
        if self.stay:
            grouped = f", order=grouped({self.together})" if self.together else ""
            lines.append(f"    persistent({self.stay}{grouped})")
        if self.groups_multiply:
            registers = f", registers={self.registers}" if self.registers else ""
            lines.append(f"    roles(load=warp(1), math=warpgroup({self.groups}){registers})")
        elif self.roles:
            lines.append(f"    roles(load=warp(1), math=warp({self.warps[0] * self.warps[1]}))")
        (rows, outer_rows), across, along, depth, columns, first, second = self.divided()
        lines += [
            f'    with site("{inner}", on="{first}"):',
            f"        a1 = {rows}",
            f"        {steps} = {across}",
            f"        r0 = {depth}",
            f"        q = {self.brought(d, self.held)}",
            f"        key = {self.brought(self.step if self.turned else d)}",
            f'    with site("{outer}", on="{second}"):',
            f"        a1 = {outer_rows}",
            f"        a2 = {columns}",
            f"        {steps} = {along}",
            f"        v = {self.brought(n)}",
            *([f"        {inner} = {self.weights}"] if self.weights else []),
            '    with site("o"):',
            f'        a1 = like("{outer}")',
            f'        a2 = like("{outer}")',
        ]
        return [x.replace("reg(1) * ", "").replace("warp(1) * ", "") for x in lines]

    def divided(self) -> tuple[Any, ...]:
        """How rows are divided, by each site, a step's keys as columns and as depth, the depth and the columns, and on
        what.
        """
        _, _, d, n = self.shape
        first, second = ("mn", "nm")[self.across == "n"], ("mn", "nm")[self.second == "a"]
        one = self.parts(self.on, dict(zip(first, (self.step, self.rows), strict=True)), first[0])
        two = self.parts(self.then or self.on, dict(zip(second, (n, self.rows), strict=True)), second[0], self.step)
        depth = "reg({}) * inst.k({})".format
        deep, along = (16 if x == "wgmma" else self.deep for x in (self.on, self.then or self.on))
        across = 1 if self.apart else self.warps[1]
        shared = f"warp({across}) * " if across > 1 else ""
        return (
            (one[first[1]], two[second[1]]), one[first[0]], shared + depth(self.step // across // along, along),
            depth(d // deep, deep), two[second[0]], one["on"], two["on"],
        )  # fmt: skip

    def parts(self, on: str, sizes: dict[str, int], columns: str, depth: int = 0) -> dict[str, str]:
        """How an instruction's rows and columns are divided, of which one is the rows of the tile, and its name.
        `depth` has the second product, whose columns all warps have.
        """
        if on == "wgmma":
            name = f"wgmma.m64n{sizes['n']}k16.f32.{self.dtype}"
            return {"m": f"warpgroup({self.groups}) * inst.m(64)", "n": f"inst.n({sizes['n']})", "on": name}
        down, across = self.warps
        down = 4 * self.groups // across if self.groups_multiply else down
        down, across = (self.apart or (down, 1)) if depth else (down, across)
        found, each = {"on": f"mma.m16n8k{self.deep}.f32.{self.dtype}"}, {"m": 16, "n": 8}
        for x, size in sizes.items():
            warps = down if x != columns else across
            found[x] = f"warp({warps}) * reg({size // warps // each[x]}) * inst.{x}({each[x]})"
        return found

    def brought(self, width: int, slots: int = 1) -> str:
        """An operand in shared memory whose rows are so long."""
        by = "tma" if self.groups_multiply else self.by
        swizzle = next((s for s in (128, 64, 32) if 2 * width % s == 0), 0)
        more = f", slots={slots}" if slots > 1 else ""
        return f'smem(by="{by}"' + (f", swizzle={swizzle}" if swizzle else "") + more + ")"


TMA = {"target": "sm_90a", "by": "tma"}
GROUPS = {"target": "sm_90a", "on": "wgmma"}
DOWN = {"across": "m", "second": "b"}
ODD = (50, 100, 48, 40)
EVERY: dict[str, Chain] = {
    **{name: Chain(between=name) for name in ("relu", "softmax", "causal")},
    "of half": Chain(dtype="f16"),
    "ragged": Chain(shape=ODD),
    "ragged, causal": Chain(shape=(50, 60, 48, 40), between="causal"),
    "more keys than rows, causal": Chain(shape=(40, 100, 32, 32), between="causal"),
    "one step": Chain(shape=(32, 32, 32, 32)),
    "less than a step": Chain(shape=(32, 20, 32, 32)),
    "wide": Chain(shape=(32, 96, 128, 128)),
    "wide, relu": Chain(shape=(32, 96, 128, 128), between="relu"),
    "unlike widths": Chain(shape=(32, 96, 80, 48)),
    "32 rows a warp": Chain(each=2),
    "32 rows a warp, causal": Chain(each=2, between="causal", shape=(128, 128, 32, 32)),
    "four slots": Chain(ring=4, shape=(32, 250, 32, 32)),
    "keys turned": Chain(turned=True),
    "products of k = 8": Chain(dtype="f16", deep=8),
    "through registers": Chain(dtype="f16", deep=8, target="sm_75", by="ld"),
    "through registers, one slab": Chain(dtype="f16", deep=8, target="sm_75", by="ld", ring=1),
    "through registers, causal": Chain(dtype="f16", deep=8, target="sm_75", by="ld", between="causal"),
    "tma": Chain(**TMA),
    "tma, causal": Chain(between="causal", **TMA),
    "roles": Chain(roles=True, **TMA),
    "roles, causal": Chain(roles=True, between="causal", **TMA),
    "roles, relu, wide": Chain(roles=True, between="relu", shape=(64, 96, 128, 128), **TMA),
    "roles, wide": Chain(roles=True, shape=(64, 96, 128, 128), **TMA),
    "warps share keys": Chain(warps=(1, 4), step=64, shape=(16, 200, 64, 64)),
    "warps share keys, relu": Chain(warps=(1, 4), step=64, shape=(8, 200, 64, 64), between="relu"),
    "warps share keys and rows": Chain(warps=(2, 2), shape=(50, 100, 32, 32)),
    "warps share keys, causal": Chain(warps=(1, 2), between="causal", shape=(48, 60, 32, 32)),
    "warps share keys, 32 rows": Chain(warps=(1, 2), each=2, shape=(32, 100, 32, 32)),
    "warps share keys, roles": Chain(warps=(1, 2), roles=True, shape=(16, 100, 64, 64), **TMA),
    "warps share keys, through registers": Chain(
        warps=(1, 2), dtype="f16", deep=8, target="sm_75", by="ld", shape=(16, 100, 32, 32)
    ),
    "warpgroups": Chain(on="wgmma", target="sm_90a"),
    "warpgroups, relu": Chain(on="wgmma", target="sm_90a", between="relu"),
    "warpgroups, causal": Chain(on="wgmma", target="sm_90a", between="causal", groups=2, shape=(128, 128, 64, 64)),
    "warpgroups, overlapped": Chain(overlap=True, **GROUPS),
    "warpgroups, overlapped, causal": Chain(
        overlap=True, between="causal", groups=2, shape=(256, 256, 64, 64), step=64, **GROUPS
    ),
    "warpgroups, overlapped, ragged": Chain(overlap=True, shape=(100, 150, 64, 64), ring=3, step=64, **GROUPS),
    "warpgroups, overlapped, one step": Chain(overlap=True, shape=(64, 60, 64, 64), step=64, **GROUPS),
    "warpgroups that stay": Chain(overlap=True, shape=(192, 100, 64, 64), stay=4, held=2, heads=3, **GROUPS),
    "warpgroups that stay, in order": Chain(shape=(192, 128, 64, 64), stay=4, heads=3, **GROUPS),
    "warpgroups that stay, causal": Chain(
        overlap=True, between="causal", shape=(320, 320, 64, 64), step=64, ring=3, stay=3, held=2, **GROUPS
    ),
    "warpgroups that stay, causal, in order": Chain(
        between="causal", groups=2, shape=(384, 384, 64, 64), step=64, stay=4, held=2, heads=3, together=3, **GROUPS
    ),
    "three warpgroups that stay, causal": Chain(
        overlap=True,
        between="causal",
        groups=3,
        shape=(300, 300, 64, 64),
        step=128,
        stay=3,
        heads=2,
        together=2,
        **GROUPS,
    ),
    "warps that stay, roles, causal": Chain(
        roles=True, between="causal", shape=(96, 96, 32, 32), stay=2, held=2, heads=2, **TMA
    ),
    "window": Chain(between="window", shape=(200, 200, 32, 32)),
    "window, tma": Chain(between="window", shape=(200, 200, 32, 32), **TMA),
    "later": Chain(between="later", shape=(100, 100, 32, 32)),
    "warpgroups, window": Chain(between="window", shape=(320, 320, 64, 64), step=64, groups=2, **GROUPS),
    "warpgroups, overlapped, window": Chain(
        overlap=True, between="window", shape=(320, 320, 64, 64), step=64, **GROUPS
    ),
    "warpgroups that stay, window": Chain(
        overlap=True, between="window", shape=(320, 320, 64, 64), step=64, ring=3, stay=3, held=2, **GROUPS
    ),
    "warpgroups that stay, later": Chain(
        overlap=True, between="later", shape=(320, 320, 64, 64), step=64, groups=2, stay=3, held=2, **GROUPS
    ),
    "rows across, weights second, relu": Chain(between="relu", second="b"),
    "keys down, weights first, relu": Chain(between="relu", across="m"),
    "keys down, weights second, relu": Chain(between="relu", weights="reg()", **DOWN),
    "keys down, weights second": Chain(shape=(20, 100, 64, 48), **DOWN),
    "keys down, weights second, causal": Chain(between="causal", shape=(60, 100, 32, 32), each=2, **DOWN),
    "keys down, weights second, warps share keys": Chain(warps=(1, 4), step=128, shape=(8, 300, 64, 64), **DOWN),
    "keys down, weights second, through registers": Chain(
        dtype="f16", deep=8, target="sm_75", by="ld", between="relu", **DOWN
    ),
    "keys down, weights second, roles": Chain(roles=True, warps=(2, 2), between="window", **DOWN, **TMA),
    "warps, then warpgroups": Chain(then="wgmma", target="sm_90a"),
    "warps, then warpgroups, causal": Chain(
        then="wgmma", target="sm_90a", groups=2, between="causal", shape=(160, 128, 64, 64)
    ),
    "warps with keys down, then warpgroups": Chain(then="wgmma", target="sm_90a", between="relu", across="m"),
    "warpgroups, then warps": Chain(then="mma", **GROUPS),
    "through memory": Chain(weights="smem()"),
    "through memory, in panels, relu": Chain(weights="smem(slots=2, swizzle=32)", between="relu", each=2),
    "keys down, through memory": Chain(weights="smem()", **DOWN),
    "through memory, copied by threads": Chain(
        weights="smem()", between="relu", dtype="f16", deep=8, target="sm_75", by="ld"
    ),
    "rows apart, relu": Chain(between="relu", warps=(2, 1), apart=(1, 2)),
    "keys apart, relu": Chain(between="relu", warps=(2, 2), apart=(4, 1), each=2, shape=(50, 100, 32, 32)),
    "rows apart, roles, relu": Chain(
        between="relu", warps=(2, 2), apart=(1, 4), roles=True, stay=1, held=2, heads=3, shape=(64, 96, 32, 64), **TMA
    ),
    "rows apart, roles, one slot, relu": Chain(
        between="relu",
        warps=(2, 1),
        apart=(1, 2),
        roles=True,
        stay=2,
        shape=(96, 96, 32, 64),
        weights="smem(slots=1)",
        **TMA,
    ),
    "warpgroups, weights second, relu": Chain(second="b", between="relu", **GROUPS),
    "warpgroups, keys down, weights second, relu": Chain(between="relu", step=64, **DOWN, **GROUPS),
    "warpgroups, keys down, weights first, relu": Chain(between="relu", across="m", step=64, **GROUPS),
    "warps, then warpgroups, weights second, relu": Chain(then="wgmma", second="b", target="sm_90a", between="relu"),
    "warpgroups, through memory": Chain(weights="smem()", groups=2, shape=(150, 128, 64, 64), **GROUPS),
    "two warpgroups, then warps": Chain(then="mma", groups=2, shape=(128, 128, 64, 64), **GROUPS),
}
