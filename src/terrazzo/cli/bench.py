"""`terrazzo bench`: measure against PyTorch."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from terrazzo.cli.output import columns, say
from terrazzo.progress import working

app = typer.Typer(help="Measure against PyTorch.", no_args_is_help=True)


class Suite(StrEnum):
    """What `--suite` may name; `bench.suites` says what is in each."""

    chains = "chains"
    layer = "layer"
    gemm = "gemm"


class GpuSuite(StrEnum):
    """What `--suite` of `bench gpu` may name; `bench.gpu.SUITES` says what is in each."""

    pointwise = "pointwise"
    reduction = "reduction"
    gemm = "gemm"
    fp32 = "fp32"
    fp32_frozen = "fp32-frozen"
    fp32_small = "fp32-small"
    fp32_hard = "fp32-hard"
    attention = "attention"
    convolution = "convolution"
    gradients = "gradients"
    block = "block"
    article = "article"
    squares = "squares"
    projections = "projections"
    odd = "odd"
    batched = "batched"
    fused = "fused"
    staircase = "staircase"
    operators = "operators"
    programs = "programs"


LONG = (GpuSuite.operators, GpuSuite.programs)
"""Suites that are measured only where they are named."""


@app.callback()
def bench() -> None:
    """Measure against PyTorch."""


@app.command()
def cpu(
    suite: Annotated[list[Suite] | None, typer.Option(help="Only this suite. Repeatable.", show_default=False)] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the record of the one suite goes.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time to spend on each case.")] = 1.0,
    threads: Annotated[int, typer.Option(envvar="TERRAZZO_THREADS", help="Threads, for both sides.")] = 2,
) -> None:
    """Compare with eager on this processor; records go to benchmarks/results/cpu of the checkout.

    Every case is checked against float64 before it is timed.
    """
    from terrazzo.bench.measure import measure, save
    from terrazzo.bench.report import conditions, rows
    from terrazzo.errors import UserError
    from terrazzo.options import Options

    chosen = suite or list(Suite)
    if json is not None and len(chosen) != 1:
        raise UserError("--json FILE takes the record of one suite: name it with --suite")
    if not 0 < seconds < float("inf"):
        raise UserError(f"--seconds {seconds:g}: it must be a number above 0")
    wrong = []
    for number, name in enumerate(chosen):
        with working(f"measuring {name.value}"):
            record = measure(name.value, Options(threads=threads, libraries="never"), seconds, threads)
        say("" if number else conditions(record) + "\n")
        for k, line in enumerate(columns(rows(record), right=(1, 2, 3, 4, 5))):
            say(line, "bold" if k == 0 else None)
        say(f"{name.value}: {record['geomean']:.2f}x of eager, the geometric mean")
        save(record, json or _folder() / f"{name.value}.json")
        wrong += [f"{c['name']}: {c['problem']}" for c in record["cases"] if c["problem"]]
    if wrong:
        say("wrong results: " + "; ".join(wrong), "bold red")
        raise typer.Exit(1)


@app.command()
def libraries(
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the record goes.", show_default=False)
    ] = None,
) -> None:
    """Count the ops of models that are called on an H200 since a library is faster by the model, or no kernel exists.

    No GPU is needed: nothing is run. The record goes to benchmarks/results of the checkout.
    """
    from terrazzo.bench.measure import save
    from terrazzo.bench.models import count
    from terrazzo.bench.report import library_rows

    with working("counting"):
        record = count()
    for k, line in enumerate(columns(library_rows(record), right=(3, 4))):
        say(line, "bold" if k == 0 else None)
    save(record, json or _folder("model") / "libraries.json")


@app.command()
def memory(
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the record goes.", show_default=False)
    ] = None,
) -> None:
    """Compare the peak memory of a call with eager's on this processor; the record goes to benchmarks/results/cpu."""
    from terrazzo.bench.measure import save
    from terrazzo.bench.memory import measure
    from terrazzo.bench.report import memory_rows
    from terrazzo.options import Options

    with working("measuring memory"):
        record = measure(Options(libraries="never"))
    for k, line in enumerate(columns(memory_rows(record), right=(2, 3, 4))):
        say(line, "bold" if k == 0 else None)
    save(record, json or _folder() / "memory.json")


@app.command("compile")
def compile_(
    only: Annotated[
        list[str] | None, typer.Option(help="Only programs whose name contains this. Repeatable.", show_default=False)
    ] = None,
    target: Annotated[str, typer.Option(help="A GPU; this machine's, or sm_90a where there is none.")] = "",
    limit: Annotated[float, typer.Option(help="Seconds after which a program is given up.")] = 600.0,
    within: Annotated[
        float, typer.Option(help="Seconds after which no program begins; called again, it goes on.", show_default=False)
    ] = float("inf"),
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the record goes.", show_default=False)
    ] = None,
) -> None:
    """Measure how long models and growing programs take to compile for a GPU, and to start again from the cache.

    Each is compiled in a process of its own. Without a GPU all is done but loading kernels. The record goes to
    benchmarks/results of the checkout; what it has of this commit and target is not measured again.
    """
    from terrazzo.bench.compiling import measure, recorded
    from terrazzo.bench.measure import save
    from terrazzo.bench.report import compile_rows
    from terrazzo.cli.output import unknown
    from terrazzo.errors import UserError
    from terrazzo.hw.gpu import GPUS

    if target and target not in GPUS:
        raise UserError(unknown("target", target, list(GPUS)))
    path = json or _folder("model") / "compile.json"
    with working("compiling"):
        record = measure(only or (), target, limit, within, recorded(path))
    if not record["cases"]:
        raise UserError(f"no program's name contains {' or '.join(map(repr, only or ()))}")
    for k, line in enumerate(columns(compile_rows(record), right=range(1, 10))):
        say(line, "bold" if k == 0 else None)
    save(record, path)


@app.command()
def gpu(
    suite: Annotated[
        list[GpuSuite] | None, typer.Option(help="Only this suite. Repeatable.", show_default=False)
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="eager, compile or max-autotune. Repeatable.", show_default=False)
    ] = None,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the records go.", show_default=False)] = None,
    libraries: Annotated[
        str, typer.Option(help="Of programs and operators: whether libraries may be called, auto or never.")
    ] = "never",
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the programs: f32, bf16, or tf32: f32 with PyTorch's switch for convolutions as it is by default."
            " Repeatable.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Programs or operators that are compiled at once.")] = 4,
    within: Annotated[
        float, typer.Option(help="Seconds after which no case begins; called again, it goes on.", show_default=False)
    ] = float("inf"),
    part: Annotated[
        str, typer.Option(metavar="K/N", help="Only the K-th of every N cases, as on one GPU of several.")
    ] = "1/1",
) -> None:
    """Compare with PyTorch on this GPU; records go to benchmarks/results/<gpu> of the checkout.

    Every case is checked against float64 first; then CUDA graphs over inputs larger than the caches are replayed in
    turns. Records are written after every case, and what they have of this commit is not measured again; called without
    `--part`, it puts those of parts together. The suites `programs` and `operators` take long, and are left out where
    no suite is named.
    """
    from terrazzo.bench.gpu import PEERS, measure
    from terrazzo.bench.gpu_report import gpu_rows, group_rows
    from terrazzo.cli.output import unknown
    from terrazzo.errors import UserError
    from terrazzo.options import LIBRARIES, Options
    from terrazzo.run.cuda import devices

    dtypes = dtype or ["bf16", "f32"]
    for kind, name, known in (
        ("option --libraries", libraries, LIBRARIES),
        *(("type", d, ("bf16", "f32", "tf32")) for d in dtypes),
    ):
        if name not in known:
            raise UserError(unknown(kind, name, known))

    peers = peer or ["eager", "compile"]
    for name in peers:
        if name not in PEERS:
            raise UserError(unknown("peer", name, PEERS))
    share = _part(part)
    if not devices():
        raise UserError(
            "`terrazzo bench gpu` needs a GPU, and PyTorch sees none; `terrazzo bench cpu` measures on the processor"
        )
    import torch

    wrong, start = [], time.monotonic()
    folder = out or _folder(torch.cuda.get_device_name().split()[-1].lower())
    for chosen in suite or [s for s in GpuSuite if s not in LONG]:
        left = within - (time.monotonic() - start)
        if chosen is GpuSuite.programs:
            wrong += _programs(folder, libraries, only, dtypes, workers)
            continue
        if chosen is GpuSuite.operators:
            wrong += _operators(folder, libraries, only, workers, left, share)
            continue
        with working(f"measuring {chosen.value}"):
            record = measure(chosen.value, Options(libraries="never"), peers, only, left, share, folder)
        for table in filter(None, (gpu_rows(record), group_rows(record))):
            for k, line in enumerate(columns(table, right=(2, 3, 4, 5, 6))):
                say(line, "bold" if k == 0 else None)
        say(
            f"{chosen.value}: "
            + ", ".join(f"{ratio:.2f}x of {name}" for name, ratio in record["geomean"].items())
            + ", geometric means"
        )
        wrong += [f"{c['case']} {c['dtype']}: {c['problem']}" for c in record["cases"] if not c["ok"]]
    if wrong:
        say("wrong: " + "; ".join(wrong), "bold red")
        raise typer.Exit(1)


def _part(text: str) -> tuple[int, int]:
    """`2/4` as numbers."""
    from terrazzo.errors import UserError

    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UserError(f"--part {text}: it must be K/N with 1 <= K <= N, as 2/4 for the second of every four cases")
    return int(number), int(count)


def _operators(
    folder: Path, libraries: str, only: str, workers: int, within: float, part: tuple[int, int]
) -> list[str]:
    """Measure the operators that the record lacks; what is wrong with those of that name."""
    from terrazzo.bench.gpu import measured_on
    from terrazzo.bench.operators import report
    from terrazzo.bench.operators.measure import measure

    with working("measuring operators"):
        record = measure(folder, measured_on(), libraries, only, workers, within, part)
    shown = [c for c in record["cases"] if only in c["case"]]
    for table, right in ((report.weak, range(4, 9)), (report.summary, range(2, 8))):
        for k, line in enumerate(columns(table({**record, "cases": shown}), right=right)):
            say(line, "bold" if k == 0 else None)
    return [f"{c['case']} {c['dtype']} {c['form']}: {why}" for c in shown if (why := report.fails(c))]


def _programs(folder: Path, libraries: str, only: str, dtypes: list[str], workers: int) -> list[str]:
    """Measure the programs that the record lacks; what is wrong with those of that name."""
    from terrazzo.bench.gpu import measured_on
    from terrazzo.bench.programs import report
    from terrazzo.bench.programs.measure import in_a_process, measure

    meta = measured_on()
    path = folder / f"programs-{libraries}.json"
    with working("measuring programs"):
        record = measure(path, meta, libraries, only, dtypes, workers, in_a_process)
    shown = [c for c in record["cases"] if only in c["case"]]
    for table in (report.rows, report.summary):
        for k, line in enumerate(columns(table({**record, "cases": shown}), right=range(3, 10))):
            say(line, "bold" if k == 0 else None)
    return [f"{c['case']} {c['dtype']}: {report.fails(c)}" for c in shown if report.fails(c)]


def _folder(kind: str = "cpu") -> Path:
    """benchmarks/results/<kind> of the checkout these sources are in, else of the current directory."""
    root = Path(__file__).parents[3]
    return (root if (root / "pyproject.toml").exists() else Path()) / "benchmarks" / "results" / kind
