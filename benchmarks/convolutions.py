"""Pinned convolutions in turns with cuDNN, with what is chosen, and with a text of Kernel IR written by hand.

    PYTHONPATH=src:. python benchmarks/convolutions.py [--by-hand FILE]

FILE is Python with a function `text(N, H, W, C, CO, R, box, no, ring)` that gives the text of a kernel whose inputs are
x[N, H, W, C] and w[CO, R * R * C], and whose result is y[N, H, W, CO]. Medians of calls in turns, microseconds; the
error is the largest difference from cuDNN over its largest value.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

from tests.kernels.convolutions import Convolution

PINNED = (
    Convolution((32, 56, 56, 64), out=64, box=(2, 8, 8), channels=64),
    Convolution((32, 28, 28, 128), out=128, box=(4, 4, 8), channels=128),
    Convolution((32, 14, 14, 256), out=256, box=(2, 8, 8), channels=128),
    Convolution((32, 56, 56, 64), out=64, box=(2, 8, 8), channels=64, persistent=132),
    Convolution((32, 28, 28, 128), out=128, box=(4, 4, 8), channels=128, persistent=132),
    Convolution((32, 14, 14, 256), out=256, box=(2, 8, 8), channels=128, persistent=132),
)
"""The boxes and rings of the text by hand, and the same where blocks stay and walk all tiles."""
TURNS, CALLS = 12, 4


def by_hand(path: str) -> Callable[..., str]:
    """The function that writes texts."""
    spec = importlib.util.spec_from_file_location("by_hand", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., str] = module.text
    return found


def measure(c: Convolution, write: Callable[..., str] | None) -> None:
    """One line for each way to compute it."""
    import torch
    import torch.nn.functional as F

    import terrazzo
    from terrazzo.ir.text import parse
    from terrazzo.options import Options
    from terrazzo.run.compiled import compile_program

    n, h, w, k = c.shape
    options, device, layout = Options(target="sm_90a", libraries="never"), "cuda:0", torch.channels_last
    x = torch.randn(n, k, h, w, device=device, dtype=torch.bfloat16).to(memory_format=layout)
    weights = torch.randn(c.out, k, c.taps, c.taps, device=device) / (k * c.taps**2) ** 0.5
    weights = weights.bfloat16().to(memory_format=layout)

    def convolve(a: Any, b: Any) -> Any:
        return F.conv2d(a, b, padding=c.padding)

    ways: dict[str, Callable[[], Any]] = {"cuDNN": lambda: convolve(x, weights)}
    pinned = compile_program(parse(c.text), {}, options, device)
    ways["pinned"] = lambda: pinned([x, weights])[0]
    chosen = terrazzo.compile(convolve, x, weights, options=options)
    ways["chosen"] = lambda: chosen(x, weights)
    if write is not None:
        text = write(n, h, w, k, c.out, c.taps, box=c.box, no=c.channels, ring=c.ring)
        hand = compile_program(parse(text, "by hand"), {}, options, device)
        flat = x.permute(0, 2, 3, 1), weights.permute(0, 2, 3, 1).reshape(c.out, -1).contiguous()
        ways["by hand"] = lambda: hand([*flat])[0].permute(0, 3, 1, 2)
    best = ways["cuDNN"]().float()
    errors = {name: float((way().float() - best).abs().max() / best.abs().max()) for name, way in ways.items()}
    times = turns(ways)
    print(f"{n} x {h} x {w}, {k} -> {c.out}, {c.taps} x {c.taps}{', persistent' if c.persistent else ''}")
    for name, us in times.items():
        print(f"  {name:8s} {us:8.1f} us  {times['cuDNN'] / us:5.2f} of cuDNN  error {errors[name]:.4f}", flush=True)


def turns(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
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


def main() -> None:
    """Every shape."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--by-hand", metavar="FILE")
    path = parser.parse_args().by_hand
    torch.backends.cudnn.benchmark = True
    for c in PINNED:
        measure(c, by_hand(path) if path else None)


if __name__ == "__main__":
    main()
