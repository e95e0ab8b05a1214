"""Pinned schedules in turns with texts of Kernel IR written by hand, and with the vendor's libraries, on an H200.

    PYTHONPATH=src:. python benchmarks/pinned.py [--by-hand FOLDER] [--only products|convolutions|chains]

Schedule 6 of ADR 004 at four shapes, convolutions as rings of boxes at three, and the chain relu(q @ k.T) @ v. FOLDER
has `ring_at_full_size.py` and `convolution_at_full_size.py`, Python with functions `text(M, N, K)` and `text(N, H, W,
C, CO, R, box, no, ring)` that give the texts. Medians of calls in turns, microseconds; the error is the largest
difference from the library over its largest value. What is slower than its goal is marked, and makes the status 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.kernels.arrangements import TMA, Product
from tests.kernels.chains import GROUPS, Chain
from tests.kernels.convolutions import Convolution

PRODUCTS = tuple(
    Product(
        shape=shape, tile=(128, 256, 64), groups=2, ring=4, roles=True, cluster="m", persistent=132, grouped=8,
        staged=TMA,
    )
    for shape in ((8192, 8192, 8192), (4096, 4096, 4096), (2048, 14336, 4096), (8192, 4096, 14336))
)  # fmt: skip
"""Schedule 6 of ADR 004."""
BOXES = (
    Convolution((32, 56, 56, 64), out=64, box=(2, 8, 8), channels=64),
    Convolution((32, 28, 28, 128), out=128, box=(4, 4, 8), channels=128),
    Convolution((32, 14, 14, 256), out=256, box=(2, 8, 8), channels=128),
)
"""The boxes and rings of the text by hand."""
CHAINS = tuple(
    Chain(
        shape=(rows, rows, 128, 128),
        between="relu",
        heads=heads,
        step=128,
        groups=2,
        registers=(24, 240),
        **more,
        **GROUPS,
    )
    for heads, rows in ((4 * 32, 2048), (32, 8192), (16 * 16, 1024))
    for more in ({}, {"overlap": True}, {"overlap": True, "stay": 132, "held": 2})
)
"""Schedules 8 and 9: plain, with steps that overlap, and with blocks that stay for all tiles."""
OF_THE_TEXT, TFLOPS, ERROR = 0.98, 550.0, 0.02
"""The goals: of the text by hand, TFLOP/s of the chain; and the error of what is right."""
TURNS, CALLS = 15, 4


@dataclass
class Row:
    """One way to compute something: microseconds, TFLOP/s, the error, and what of the text by hand it reaches."""

    what: str
    way: str
    us: float
    tflops: float
    error: float
    of: dict[str, float] = field(default_factory=dict)
    missed: bool = False

    def __str__(self) -> str:
        of = "".join(f"  {ratio:5.3f} of {name}" for name, ratio in self.of.items())
        speed = f"{self.us:9.1f} us {self.tflops:7.1f} TFLOP/s"
        return f"{self.what:42} {self.way:18} {speed}  error {self.error:.4f}{of}{'  MISSED' * self.missed}"


Ways = dict[str, Callable[[], Any]]


def module(folder: str, name: str) -> Callable[..., str]:
    """The function of a file that writes texts."""
    spec = importlib.util.spec_from_file_location(name, Path(folder) / f"{name}.py")
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    text: Callable[..., str] = found.text
    return text


def compiled(text: str, *arguments: Any) -> Callable[[], Any]:
    """A call of the kernels of a text."""
    from terrazzo.ir.text import parse
    from terrazzo.options import Options
    from terrazzo.run.compiled import compile_program

    found = compile_program(parse(text), {}, Options(target="sm_90a", libraries="never"), "cuda:0")
    return lambda: found([*arguments])[0]


def chosen(fn: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """A call of what the model chooses."""
    import terrazzo
    from terrazzo.options import Options

    options = Options(target="sm_90a", libraries="never")
    return partial(terrazzo.compile(fn, *arguments, options=options), *arguments)


def products(folder: str | None) -> Iterator[Row]:
    """x @ w.T by cuBLAS, by hand, and by schedule 6."""
    import torch

    for p in PRODUCTS:
        m, n, k = p.shape
        x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        ways: Ways = {"cuBLAS": partial(torch.matmul, x, w.t()), "pinned": compiled(p.text, x, w)}
        ways["chosen"] = chosen(lambda x, w: x @ w.t(), x, w)
        if folder:
            ways["by hand"] = compiled(module(folder, "ring_at_full_size")(m, n, k), x, w)
        yield from rows(f"product {m} x {n} x {k}", ways, 2 * m * n * k)


def convolutions(folder: str | None) -> Iterator[Row]:
    """Convolutions by cuDNN, by hand, and by rings of boxes."""
    import torch
    import torch.nn.functional as F

    torch.backends.cudnn.benchmark = True
    for c in BOXES:
        n, h, w, k = c.shape
        x = torch.randn(n, k, h, w, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        weights = torch.randn(c.out, k, c.taps, c.taps, device="cuda") / (k * c.taps**2) ** 0.5
        weights = weights.bfloat16().to(memory_format=torch.channels_last)
        convolve = partial(F.conv2d, padding=c.padding)
        ways: Ways = {
            "cuDNN": partial(convolve, x, weights),
            "pinned": compiled(c.text, x, weights),
            "pinned, stays": compiled(replace(c, persistent=132).text, x, weights),
            "chosen": chosen(lambda x, w, convolve=convolve: convolve(x, w), x, weights),
        }
        if folder:
            write = module(folder, "convolution_at_full_size")
            text = write(n, h, w, k, c.out, c.taps, box=c.box, no=c.channels, ring=c.ring)
            flat = weights.permute(0, 2, 3, 1).reshape(c.out, -1).contiguous()
            hand = compiled(text, x.permute(0, 2, 3, 1), flat)
            ways["by hand"] = partial(lambda hand: hand().permute(0, 3, 1, 2), hand)
        what = f"convolution {n} x {h} x {w}, {k} -> {c.out}, {c.taps} x {c.taps}"
        yield from rows(what, ways, 2 * n * h * w * k * c.out * c.taps**2)


def chains(folder: str | None) -> Iterator[Row]:
    """relu(q @ k.T) @ v by PyTorch, and by pinned schedules; nobody wrote it by hand at full size."""
    import torch

    for c in CHAINS[::3]:
        m, k, d, n = c.shape
        sizes = (m, d), (k, d), (k, n)
        q, key, v = (torch.randn(c.heads, *size, device="cuda", dtype=torch.bfloat16) for size in sizes)
        ways: Ways = {"eager": partial(lambda q, key, v: (q @ key.mT * 0.25).relu() @ v, q, key, v)}
        for other in CHAINS:
            if other.shape == c.shape and other.heads == c.heads:
                how = ("overlapped" if other.overlap else "plain") + (", stays" if other.stay else "")
                ways[how] = compiled(other.text, q, key, v)
        yield from rows(f"chain {c.heads} x {m} x {d}", ways, 4 * c.heads * m * k * d)


def rows(what: str, ways: Ways, operations: int) -> Iterator[Row]:
    """A row for each way; the first is a library, "by hand" a text."""
    library, *_ = ways
    best = ways[library]().float()
    errors = {name: float((way().float() - best).abs().max() / best.abs().max()) for name, way in ways.items()}
    times = turns(ways)
    for name, us in times.items():
        row = Row(what, name, us, operations / us / 1e6, errors[name])
        row.of = {other: times[other] / us for other in (library, "by hand") if other in times and other != name}
        row.missed = errors[name] > ERROR or (name == "pinned" and row.of.get("by hand", 1) < OF_THE_TEXT)
        yield row


def turns(ways: Ways) -> dict[str, float]:
    """Microseconds of a call of each."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, way in ways.items():
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            torch.cuda._sleep(400_000)
            begin.record()
            for _ in range(CALLS):
                way()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / CALLS)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    """Every shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--by-hand", metavar="FOLDER", help="where the texts by hand are written")
    tables = {"products": products, "convolutions": convolutions, "chains": chains}
    parser.add_argument("--only", choices=tables)
    given = parser.parse_args()
    found = []
    for name, table in tables.items():
        if given.only in (None, name):
            for row in table(given.by_hand):
                found.append(row)
                print(row, flush=True)
    fastest: dict[str, float] = {}
    for row in found:
        if row.what.startswith("chain") and row.way != "eager" and not row.missed:
            fastest[row.what] = max(fastest.get(row.what, 0), row.tflops)
    slow = [what for what, tflops in fastest.items() if tflops < TFLOPS]
    missed = [f"{row.what}, {row.way}" for row in found if row.missed] + slow
    print(f"\nGoals missed: {'; '.join(missed) or 'none'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
