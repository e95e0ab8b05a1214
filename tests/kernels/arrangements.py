"""Products under pinned schedules, as text of Tile IR: one term, and the ways to arrange a kernel that computes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """`y[m, n] = epilogue(sum over k of x[m, k] * w[n, k])`, and how it is bound.

    The operands are stored as `x_axes` and `w_axes` say ("mk" or "km", "nk" or "kn"). `tile` has a block's part of m, n
    and a step's part of k. On `wgmma`, `groups` warpgroups divide m, on `mma` warps divide m and n as `warps` says, on
    `fma` these and 32 lanes; `depth` is how they divide a step's k. With `promote`, CUDA cores add up the steps' sums.
    `cluster` is the axis that so many blocks divide, with what misses it multicast; of "k", they share sums. With
    `turns`, so many warpgroups have a tile each, one after the other; with `lag`, one begins steps behind another.
    `first` is where the first operand is multiplied from; steps may `begin` by the tile of an axis.
    """

    shape: tuple[int, int, int] = (128, 128, 192)
    tile: tuple[int, int, int] = (64, 64, 64)
    on: str = "wgmma"
    dtype: str = "bf16"
    out: str = ""
    target: str = "sm_90a"
    batch: int = 0
    x_axes: str = "mk"
    w_axes: str = "nk"
    groups: int = 1
    columns: int = 1
    warps: tuple[int, int] = (2, 2)
    ring: int = 3
    by: str = "tma"
    swizzle: int = 128
    roles: bool = False
    registers: tuple[int, int] | None = (40, 232)
    turns: int = 0
    lag: bool = False
    persistent: int = 0
    grouped: int = 0
    cluster: str = ""
    blocks: int = 2
    multicast: bool = True
    staged: str = ""
    width: int = 0
    depth: str = ""
    first: str = "smem"
    promote: bool = False
    begin: str = ""
    epilogue: str = "y[{at}] = {out}(acc0)"
    extra: str = ""

    @property
    def wide(self) -> bool:
        """Whether factors are of 16 bits."""
        return self.dtype != "f32"

    @property
    def text(self) -> str:
        """A program of this kernel and its schedule."""
        m, n, _ = self.shape
        out = self.out or self.dtype
        lead = f"{self.batch}, " if self.batch else ""
        at = "a0, a1, a2" if self.batch else "a0, a1"
        rows, columns = at.split(", ")[-2:]
        letters = {"m": rows, "n": columns, "k": "r0"}
        sizes = dict(zip("mnk", self.shape, strict=True))
        b = "a0, " if self.batch else ""
        kinds = {x: f"{self.dtype}[{lead}{', '.join(str(sizes[c]) for c in axes)}]" for x, axes in self.operands}
        x, w = (f"{name}[{b}{', '.join(letters[c] for c in axes)}]" for name, axes in self.operands)
        x, w = (f"f32({e})" if self.wide else e for e in (x, w))
        extra = f", {self.extra}" if self.extra else ""
        ends = self.epilogue.format(at=at, out=out, m=rows, n=columns).splitlines()
        results = [line.split("[")[0] for line in ends if "[" in line.split("=")[0]]
        types = ", ".join(f"{name}={out}[{lead}{m}, {n}]" for name in results)
        loops = [
            *([f"for a0 in free({self.batch}):"] if self.batch else []),
            f"for {rows} in free({m}):",
            f"for {columns} in free({n}):",
        ]
        lines = ["@tile", f"def f(x: {kinds['x']}, w: {kinds['w']}{extra}):", f"    with kernel('y', {types}):"]
        lines += ["    " * (2 + d) + loop for d, loop in enumerate(loops)]
        deep = "    " * (2 + len(loops))
        lines += [f"{deep}for r0 in reduce({sizes['k']}):", f"{deep}    acc0 <- sum(mul({x}, {w}))"]
        lines += [deep + line for line in ends]
        lines += ["    " + line for line in self.schedule(rows, columns, results)]
        return "\n".join([*lines, f"    return ({', '.join(results)},)", ""])

    @property
    def operands(self) -> tuple[tuple[str, str], ...]:
        return ("x", self.x_axes), ("w", self.w_axes)

    def schedule(self, m: str, n: str, results: list[str]) -> list[str]:
        """The lines of the schedule."""
        count = {}
        cuts = {}
        for axis, size, tile, letter in zip((m, n), self.shape, self.tile, "mn", strict=False):
            shared = self.blocks if self.cluster == letter else 1
            count[letter] = -(-size // (tile * shared))
            cuts[letter] = (
                f"{axis} = grid({count[letter]}) * "
                + (f"cluster({shared}) * " if shared > 1 else "")
                + f"block({tile})"
            )
        shared = self.blocks if self.cluster == "k" else 1
        steps = -(-self.shape[2] // (self.tile[2] * shared))
        options = ", promote=True" * self.promote + (f', begin="{self.begin}"' if self.begin else "")
        deep = f"time({steps}, ring={self.ring}{options}) * block({self.tile[2]})"
        lines = [f'with schedule("y", target="{self.target}"):']
        lines += [f"    a0 = grid({self.batch})"] if self.batch else []
        lines += [
            f"    {cuts['m']}",
            f"    {cuts['n']}",
            f"    r0 = cluster({shared}) * {deep}" if shared > 1 else f"    r0 = {deep}",
        ]
        if self.persistent:
            order = f", order=grouped({self.grouped})" if self.grouped else ""
            lines.append(f"    persistent({self.persistent}{order})")
        if self.roles:
            shared = int(self.depth[5:6]) if self.depth.startswith("warp(") else 1
            math = (
                f"warpgroup({self.turns or self.groups})"
                if self.on == "wgmma"
                else f"warp({self.warps[0] * self.warps[1] * shared})"
            )
            own = self.registers if self.on == "wgmma" and self.groups < 3 else None
            registers = f", registers={own}" if own else ""
            turns = ", turns=True" * bool(self.turns) + ", lag=True" * self.lag
            lines.append(f"    roles(load=warp(1), math={math}{registers}{turns})")
        sites, instruction = self.divided(m, n)
        lines.append(f'    with site("acc0", on="{instruction}"):')
        lines += [f"        {line}" for line in sites]
        for (name, _), misses in zip(self.operands, ("n", "m"), strict=True):
            options = [f'by="{self.by}"']
            if self.swizzle:
                options.append(f"swizzle={self.swizzle}")
            if self.cluster == misses and self.multicast:
                options.append("multicast=True")
            place = self.first if name == "x" else "smem"
            lines.append(f"        {name} = {place}({', '.join(options)})")
        names = ", ".join(f'"{r}"' for r in results)
        if self.staged == "":
            return [*lines, f"    with site({names}):", f'        {m} = like("acc0")', f'        {n} = like("acc0")']
        width = self.width or 128 // (4 if (self.out or self.dtype) == "f32" else 2)
        for name in results:
            lines.append(f'    with site("{name}"):')
            if self.tile[1] > width and self.columns == 1 and self.on == "wgmma":
                lines.append(f"        {n} = time({self.tile[1] // width}, ring=2) * block({width})")
            lines.append(f"        {name} = smem({self.staged})")
        return lines

    def divided(self, m: str, n: str) -> tuple[list[str], str]:
        """How the threads divide a block's part, and the instruction."""
        lines, instruction = self._divided(m, n)
        if self.depth:
            lines[-1] = f"r0 = {self.depth}"
        return lines, instruction

    def _divided(self, m: str, n: str) -> tuple[list[str], str]:
        tm, tn, tk = self.tile
        a, b = self.warps
        if self.on == "wgmma":
            each = tm // (64 * self.groups)
            lines = [
                f"{m} = warpgroup({self.groups}) * reg({each}) * inst.m(64)",
                f"{n} = reg({self.columns}) * inst.n({tn // self.columns})",
            ]
            lines += [f"r0 = reg({tk // 16}) * inst.k(16)"]
            return [x.replace("reg(1) * ", "") for x in lines], f"wgmma.m64n{tn // self.columns}k16.f32.{self.dtype}"
        if self.on == "mma":
            lines = [
                f"{m} = warp({a}) * reg({tm // (16 * a)}) * inst.m(16)",
                f"{n} = warp({b}) * reg({tn // (8 * b)}) * inst.n(8)",
            ]
            return [*lines, f"r0 = reg({tk // 16}) * inst.k(16)"], f"mma.m16n8k16.f32.{self.dtype}"
        lanes = (4, 4) if "lane" in self.depth else (4, 8)
        lines = [
            f"{x} = warp({w}) * lane({c}) * reg({t // (c * w)})"
            for x, w, c, t in zip((m, n), self.warps, lanes, (tm, tn), strict=True)
        ]
        return [*lines, f"r0 = reg({tk})"], "fma.f32"


TMA, PADDED = 'by="tma", swizzle=128', "pad=8"
M = {"on": "mma", "target": "sm_80", "tile": (64, 64, 32), "swizzle": 64, "by": "cp.async", "shape": (128, 128, 160)}
M90 = M | {"target": "sm_90a", "by": "tma"}
F = {
    "on": "fma", "target": "sm_80", "dtype": "f32", "tile": (32, 32, 16), "shape": (50, 70, 92), "swizzle": 0,
    "by": "cp.async",
}  # fmt: skip
F90 = F | {"target": "sm_90a", "by": "tma", "shape": (64, 64, 64)}
BIAS = {"epilogue": "y[{at}] = {out}(add(acc0, f32(b[{n}])))", "extra": "b: bf16[128]"}
ROWS = {"epilogue": "y[{at}] = {out}(mul(acc0, b[{m}]))", "extra": "b: f32[128]"}
RESIDUAL = {"epilogue": "y[{at}] = {out}(add(acc0, f32(r[{at}])))", "extra": "r: bf16[128, 128]"}
GATED = {"epilogue": "v0 = mul(acc0, f32(0.5))\nv1 = mul(v0, add(f32(1.0), tanh(acc0)))\ny[{at}] = {out}(v1)"}
TWO = {
    "epilogue": "v0 = add(acc0, f32(b[{n}]))\ny[{at}] = {out}(v0)\nz[{at}] = {out}(mul(v0, f32(r[{at}])))",
    "extra": "b: bf16[128], r: bf16[128, 128]",
}
RAGGED = (100, 72, 200)

WARPGROUPS: dict[str, Product] = {
    "wgmma": Product(),
    "roles": Product(roles=True),
    "persistent": Product(persistent=2),
    "roles, persistent": Product(roles=True, persistent=2),
    "cluster of m": Product(cluster="m", roles=True),
    "cluster of n": Product(cluster="n", roles=True),
    "cluster of m, nothing shared": Product(cluster="m", roles=True, multicast=False),
    "cluster, all warps load": Product(cluster="m", multicast=False),
    "cluster of four": Product(shape=(256, 64, 192), cluster="m", blocks=4, roles=True),
    "cluster, persistent": Product(shape=(256, 192, 192), cluster="m", roles=True, persistent=4),
    "cluster, persistent, in groups, staged": Product(
        shape=(512, 256, 192),
        tile=(128, 128, 64),
        cluster="m",
        roles=True,
        persistent=4,
        groups=2,
        grouped=2,
        staged=TMA,
    ),
    "staged by tma, all warps load": Product(staged=TMA),
    "staged by tma": Product(staged=TMA, roles=True),
    "staged": Product(staged="swizzle=128", roles=True),
    "staged with a pad": Product(staged=PADDED, roles=True),
    "staged plainly": Product(staged='by="tma"', roles=True),
    "f32 staged by tma": Product(out="f32", staged=TMA, roles=True),
    "f32 staged": Product(out="f32", staged="swizzle=128", roles=True),
    "staged, persistent": Product(staged=TMA, roles=True, persistent=2),
    "ragged": Product(shape=RAGGED, roles=True),
    "ragged, staged by tma": Product(shape=RAGGED, roles=True, staged=TMA),
    "ragged, staged": Product(shape=RAGGED, roles=True, staged="swizzle=128"),
    "ragged, all warps load": Product(shape=RAGGED),
    "odd columns": Product(shape=(100, 71, 200), roles=True),
    "few rows": Product(shape=(5, 128, 192), roles=True),
    "few columns": Product(shape=(128, 8, 192), roles=True),
    "one step": Product(shape=(128, 128, 64), roles=True),
    "fewer steps than slots": Product(shape=(128, 128, 128), ring=4, roles=True),
    "less than a step": Product(shape=(128, 128, 40), ring=4, roles=True),
    "one step, all warps load": Product(shape=(128, 128, 64)),
    "fewer steps than slots, all warps load": Product(shape=(128, 128, 128), ring=4),
    "less than a step, all warps load": Product(shape=(128, 128, 40), ring=4),
    "half": Product(dtype="f16", roles=True),
    "f32 of bf16": Product(out="f32", roles=True),
    "batch": Product(batch=3, roles=True),
    "batch, persistent": Product(batch=3, roles=True, persistent=2),
    "ragged batch": Product(batch=3, shape=RAGGED, roles=True),
    "ragged batch, staged by tma": Product(batch=3, shape=RAGGED, roles=True, staged=TMA),
    "ragged batch, staged": Product(batch=3, shape=RAGGED, roles=True, staged="swizzle=128"),
    "w along n": Product(w_axes="kn", roles=True),
    "x along m": Product(x_axes="km", roles=True),
    "both turned": Product(x_axes="km", w_axes="kn", roles=True),
    "both turned, ragged": Product(x_axes="km", w_axes="kn", roles=True, shape=(104, 72, 200)),
    "both turned, all warps load": Product(x_axes="km", w_axes="kn"),
    "both turned, cluster": Product(x_axes="km", w_axes="kn", roles=True, cluster="m", shape=(256, 128, 192)),
    "w along n in panels": Product(w_axes="kn", roles=True, tile=(64, 128, 64)),
    **{f"ring of {n}": Product(ring=n, roles=True, shape=(128, 128, 448)) for n in (1, 2, 4, 6)},
    **{f"ring of {n}, all warps load": Product(ring=n, shape=(128, 128, 448)) for n in (2, 4, 6)},
    "two warpgroups": Product(groups=2, tile=(128, 64, 64), roles=True),
    "two warpgroups, all warps load": Product(groups=2, tile=(128, 64, 64)),
    "two warpgroups, staged": Product(groups=2, tile=(128, 64, 64), roles=True, staged=TMA),
    "two warpgroups, staged, all warps load": Product(groups=2, tile=(128, 64, 64), staged="swizzle=128"),
    "three warpgroups": Product(groups=3, tile=(192, 64, 64), shape=(200, 128, 192), roles=True),
    "three warpgroups, all warps load": Product(groups=3, tile=(192, 64, 64), shape=(200, 128, 192)),
    "two products down": Product(tile=(128, 64, 64), roles=True),
    "two products down, staged": Product(tile=(128, 64, 64), roles=True, staged=TMA),
    "two products across": Product(tile=(64, 128, 64), columns=2, roles=True),
    "two products across, staged": Product(tile=(64, 128, 64), columns=2, roles=True, staged=TMA),
    "steps in panels": Product(tile=(64, 64, 128), shape=(128, 128, 320), roles=True),
    "steps in panels, all warps load": Product(tile=(64, 64, 128), shape=(128, 128, 320)),
    "narrow steps": Product(tile=(64, 64, 32), swizzle=64, roles=True),
    **{
        f"{n} columns": Product(tile=(64, n, 64), shape=(64, n + 8, 128), roles=True)
        for n in (8, 16, 32, 256, 24, 96, 192)
    },
    **{
        f"{n} columns, staged": Product(
            tile=(64, n, 64), shape=(64, n + 8, 128), roles=True, width=w, staged=f"{by}swizzle={s}"
        )
        for n, w, s, by in (
            (16, 16, 32, 'by="tma", '),
            (256, 64, 128, 'by="tma", '),
            (24, 24, 0, ""),
            (96, 32, 64, 'by="tma", '),
        )
    },
    "cp.async": Product(by="cp.async"),
    "cp.async, four slots": Product(by="cp.async", ring=4, shape=(128, 64, 448)),
    "through registers": Product(by="ld", ring=2),
    "cp.async, staged": Product(by="cp.async", staged=TMA),
    "cp.async, persistent": Product(by="cp.async", persistent=2),
    "cp.async, cluster": Product(by="cp.async", cluster="m", multicast=False),
    "cp.async, ragged": Product(by="cp.async", shape=RAGGED),
    "cp.async, two warpgroups": Product(by="cp.async", groups=2, tile=(128, 64, 64)),
    "cp.async, both turned": Product(by="cp.async", x_axes="km", w_axes="kn"),
}
K = {"cluster": "k", "roles": True, "registers": None}
CLUSTERED: dict[str, Product] = {
    "shared sums": Product(**K, shape=(128, 128, 256)),
    "shared sums, staged by tma": Product(**K, shape=(128, 128, 256), staged=TMA),
    "shared sums, a subtile for each block": Product(**K, shape=(64, 128, 256), tile=(64, 128, 64), staged=TMA),
    "shared sums of four": Product(**K, shape=(64, 128, 1000), tile=(64, 128, 64), blocks=4, ring=4),
    "shared sums of four, two subtiles": Product(**K, shape=(64, 128, 1000), tile=(64, 128, 64), blocks=4, staged=TMA),
    "shared sums of three": Product(
        **K, shape=(64, 96, 384), tile=(64, 96, 64), blocks=3, staged='by="tma", swizzle=64', width=32
    ),
    "shared sums of eight, few columns": Product(**K, shape=(64, 16, 1024), tile=(64, 16, 64), blocks=8),
    "shared sums, eight columns": Product(**K, shape=(128, 8, 256), tile=(64, 8, 64)),
    "shared sums, ragged": Product(**K, shape=RAGGED),
    "shared sums, ragged, staged": Product(**K, shape=RAGGED, staged="swizzle=128"),
    "shared sums, odd columns": Product(**K, shape=(100, 71, 200)),
    "shared sums, two warpgroups": Product(**K, shape=(128, 64, 384), groups=2, tile=(128, 64, 64), staged=TMA),
    "shared sums, two products down": Product(**K, shape=(128, 64, 256), tile=(128, 64, 64)),
    "shared sums, both turned": Product(**K, shape=(128, 64, 256), x_axes="km", w_axes="kn"),
    "shared sums, batch": Product(**K, batch=3, shape=(64, 64, 256)),
    "shared sums, x in registers": Product(**K, first="reg", shape=(64, 64, 256)),
    "shared sums, promoted": Product(**K, promote=True, shape=(64, 64, 256)),
    "shared sums, f32": Product(**K, out="f32", shape=(128, 64, 256), staged=TMA),
    "shared sums, residual": Product(**K, **RESIDUAL, shape=(128, 128, 256), tile=(64, 128, 64), staged=TMA),
    "shared sums, begun by columns": Product(**K, shape=(64, 192, 504), begin="a1"),
    "begun by columns": Product(roles=True, begin="a1"),
    "begun by rows, ragged, staged by tma": Product(shape=RAGGED, roles=True, staged=TMA, begin="a0"),
    "begun by columns, persistent": Product(shape=(64, 320, 192), roles=True, persistent=2, begin="a1"),
    "begun by columns, all warps load": Product(begin="a1", shape=(64, 192, 200)),
    "begun by columns, cp.async": Product(by="cp.async", begin="a1", shape=(64, 192, 200)),
    "begun by columns, batch": Product(batch=3, roles=True, begin="a2"),
    "shared sums, two results": Product(**K, **TWO, shape=(128, 128, 256), tile=(64, 128, 64)),
}
REGISTERS: dict[str, Product] = {
    "x in registers": Product(first="reg"),
    "x in registers, roles": Product(first="reg", roles=True),
    "x in registers, persistent": Product(first="reg", roles=True, persistent=2),
    "x in registers, five slots": Product(first="reg", ring=5, shape=(128, 64, 448)),
    "x in registers, ragged": Product(first="reg", shape=RAGGED, roles=True),
    "x in registers, one fragment a step": Product(
        first="reg", roles=True, tile=(64, 64, 16), swizzle=32, shape=(64, 64, 80)
    ),
    "x in registers, three a step": Product(
        first="reg", roles=True, tile=(64, 64, 48), swizzle=32, shape=(64, 64, 240)
    ),
    "x in registers, two products down": Product(first="reg", roles=True, tile=(128, 64, 64)),
    "x in registers, two warpgroups": Product(first="reg", roles=True, groups=2, tile=(128, 64, 64)),
    "x in registers, two warpgroups, all warps load": Product(first="reg", groups=2, tile=(128, 64, 64)),
    "x in registers, along m": Product(first="reg", roles=True, x_axes="km"),
    "x in registers, both turned": Product(first="reg", roles=True, x_axes="km", w_axes="kn"),
    "x in registers, cp.async": Product(first="reg", by="cp.async", ring=4, shape=(128, 64, 448)),
    "x in registers, staged": Product(first="reg", roles=True, staged=TMA),
    "x in registers, turns": Product(first="reg", roles=True, persistent=1, turns=2, shape=(320, 64, 320)),
    "x in registers, warpgroups share k": Product(first="reg", depth="warpgroup(2) * reg(2) * inst.k(16)"),
}
TURNS: dict[str, Product] = {
    "turns": Product(shape=(320, 64, 320), roles=True, persistent=1, turns=2),
    "turns, staged": Product(shape=(300, 128, 192), roles=True, persistent=2, turns=2, staged=TMA),
    "lag, staged": Product(
        shape=(300, 128, 320), tile=(128, 64, 64), groups=2, roles=True, persistent=2, lag=True, staged=TMA
    ),
    "lag in a cluster": Product(
        shape=(512, 128, 192), tile=(128, 64, 64), groups=2, roles=True, persistent=2, lag=True, cluster="m"
    ),
    "turns of three": Product(shape=(256, 128, 192), roles=True, persistent=2, turns=3, registers=None),
    "turns in a cluster": Product(shape=(512, 128, 192), roles=True, persistent=2, turns=2, cluster="m"),
    "turns, one tile": Product(shape=(64, 64, 192), roles=True, persistent=1, turns=2),
}
WARPS: dict[str, Product] = {
    "mma": Product(**M),
    **{f"mma, ring of {n}": Product(**M | {"ring": n}) for n in (1, 2, 6)},
    "mma, through registers": Product(**M | {"by": "ld", "ring": 2}),
    "mma, through registers, one slab": Product(**M | {"by": "ld", "ring": 1}),
    "mma, less than a step": Product(**M | {"by": "ld", "ring": 2, "shape": (64, 64, 20)}),
    "mma, persistent": Product(**M | {"persistent": 2, "grouped": 2}),
    "mma, begun by columns": Product(**M | {"begin": "a1"}),
    "mma, staged": Product(**M | {"staged": "swizzle=128"}),
    "mma, staged with a pad": Product(**M | {"staged": PADDED}),
    "mma, staged, persistent": Product(**M | {"staged": "swizzle=128", "persistent": 2}),
    "mma, staged by stmatrix": Product(**M90 | {"staged": "swizzle=128"}),
    "mma, staged by tma": Product(**M90 | {"staged": TMA}),
    "mma, tma": Product(**M90),
    "mma, roles": Product(**M90 | {"roles": True}),
    "mma, roles, persistent, staged": Product(**M90 | {"roles": True, "persistent": 2, "staged": TMA}),
    "mma, cluster": Product(**M90 | {"cluster": "m", "multicast": False, "roles": True}),
    "mma, ragged": Product(**M | {"shape": RAGGED}),
    "mma, odd": Product(**M | {"shape": (99, 71, 199), "by": "ld", "ring": 2}),
    "mma, ragged, staged": Product(**M | {"shape": RAGGED, "staged": "swizzle=128"}),
    "mma, both turned": Product(**M | {"x_axes": "km", "w_axes": "kn", "tile": (32, 32, 32)}),
    "mma, both turned, roles": Product(**M90 | {"x_axes": "km", "w_axes": "kn", "tile": (32, 32, 32), "roles": True}),
    "mma, half": Product(**M | {"dtype": "f16"}),
    "mma, f32 of bf16": Product(**M | {"out": "f32"}),
    "mma, f32 staged": Product(**M | {"out": "f32", "staged": "swizzle=128"}),
    "mma, batch": Product(**M | {"batch": 3}),
    "mma, batch, staged": Product(**M | {"batch": 3, "staged": "swizzle=128"}),
}
ELEMENTS: dict[str, Product] = {
    "fma": Product(**F),
    "fma, through registers": Product(**F | {"target": "sm_75", "by": "ld", "ring": 2, "shape": (50, 70, 90)}),
    "fma, persistent": Product(**F | {"persistent": 2}),
    "fma, through registers, persistent": Product(**F | {"by": "ld", "ring": 2, "persistent": 2}),
    "fma, tma": Product(**F90),
    "fma, roles": Product(**F90 | {"roles": True}),
    "fma, roles, persistent": Product(**F90 | {"roles": True, "persistent": 2}),
    "fma, cluster": Product(**F90 | {"cluster": "m", "multicast": False}),
}
SHARED: dict[str, Product] = {
    "warps share k": Product(**M | {"depth": "warp(2) * reg(1) * inst.k(16)"}),
    "warps share k in turns": Product(**M | {"tile": (32, 32, 64), "depth": "reg(2) * warp(2) * inst.k(16)"}),
    "warps share k, persistent": Product(**M | {"depth": "warp(2) * reg(1) * inst.k(16)", "persistent": 2}),
    "warps share k, roles": Product(**M90 | {"depth": "warp(2) * reg(1) * inst.k(16)", "roles": True, "warps": (2, 1)}),
    "warpgroups share k": Product(depth="warpgroup(2) * reg(2) * inst.k(16)"),
    "warpgroups share k, persistent": Product(depth="warpgroup(2) * reg(2) * inst.k(16)", persistent=2),
    "warpgroups share k and m": Product(groups=2, tile=(128, 64, 64), depth="warpgroup(2) * reg(2) * inst.k(16)"),
    "lanes share k": Product(**F | {"depth": "lane(2) * reg(8)"}),
    "lanes and warps share k": Product(**F | {"warps": (2, 1), "depth": "warp(2) * lane(2) * reg(4)"}),
}
WAYS = {"": "", ", staged": "swizzle=128", ", staged by tma": TMA}
ENDS: dict[str, Product] = {
    f"{name}{way}": Product(roles=True, persistent=2, staged=staged, **end)
    for name, end in {"bias": BIAS, "rows": ROWS, "residual": RESIDUAL, "gated": GATED, "two results": TWO}.items()
    for way, staged in WAYS.items()
} | {
    f"mma, {name}": Product(**M | end | {"staged": PADDED}) for name, end in {"bias": BIAS, "two results": TWO}.items()
}

PROMOTED: dict[str, Product] = {
    "promoted": Product(promote=True),
    "promoted, roles": Product(promote=True, roles=True, persistent=2, groups=2, tile=(128, 64, 64), ring=2),
    "promoted, staged": Product(promote=True, roles=True, persistent=2, staged=TMA),
    "promoted, two products across": Product(promote=True, tile=(64, 128, 64), columns=2, roles=True),
    "promoted, turns": Product(promote=True, shape=(320, 64, 320), roles=True, persistent=1, turns=2),
    "promoted, one slot": Product(promote=True, roles=True, ring=1),
    "promoted, cp.async": Product(promote=True, by="cp.async", ring=4),
    "promoted, through registers": Product(promote=True, by="ld", ring=2),
    "promoted, less than a step": Product(promote=True, roles=True, shape=(128, 128, 40)),
    "promoted, warpgroups share k": Product(promote=True, depth="warpgroup(2) * reg(2) * inst.k(16)"),
    "promoted, mma": Product(**M | {"promote": True}),
    "promoted, mma, roles": Product(**M90 | {"promote": True, "roles": True}),
}

EVERY = WARPGROUPS | CLUSTERED | REGISTERS | TURNS | WARPS | ELEMENTS | SHARED | ENDS | PROMOTED

BY_HAND: dict[str, Product] = {
    "registers": Product(shape=(64, 64, 128), ring=2, out="f32", first="reg"),
    "ring": Product(shape=(128, 256, 512), tile=(128, 256, 64), groups=2, ring=4, roles=True, out="f32"),
    "persistent": Product(
        shape=(320, 32, 192),
        tile=(64, 32, 64),
        ring=2,
        roles=True,
        persistent=2,
        width=32,
        staged='by="tma", swizzle=64',
    ),
    "cluster": Product(
        shape=(512, 256, 320), tile=(128, 256, 64), groups=2, roles=True, cluster="m", staged='by="tma", swizzle=128'
    ),
    "copied": Product(shape=(128, 64, 320), tile=(128, 64, 64), groups=2, ring=4, by="cp.async", out="f32"),
    "ping_pong": Product(shape=(256, 64, 128), roles=True, persistent=1, turns=2, staged=TMA),
    "split": Product(
        shape=(128, 32, 256), tile=(64, 32, 128), ring=2, out="f32", depth="warpgroup(2) * reg(4) * inst.k(16)"
    ),
}
"""What the texts under `by_hand` of these names say, as schedules."""
