"""`terrazzo sim`: a kernel's text on the simulator of the GPU."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from terrazzo.cli.output import columns, say


class Interleave(StrEnum):
    """Who goes next: all warps in turn, or in an order that lets some run far ahead."""

    fair = "fair"
    adversarial = "adversarial"


def sim(
    file: Annotated[Path, typer.Argument(help="Kernel IR: what `compile --ir kernel` prints, or written by hand.")],
    interleave: Annotated[
        Interleave, typer.Option(help="fair: warps go step by step. adversarial: some run far ahead.")
    ] = Interleave.fair,
    seed: Annotated[
        int, typer.Option(help="Of the adversarial order; the first of them, where there are several runs.")
    ] = 0,
    runs: Annotated[int, typer.Option(min=1, help="How many adversarial orders to try.")] = 1,
    costs: Annotated[
        bool, typer.Option(help="Count what costs time: bank conflicts, sectors, bytes, instructions.")
    ] = False,
) -> None:
    """Run Kernel IR without a GPU, on random inputs, and say what is wrong with it.

    Races, missing barriers and fences, deadlocks, unwritten memory and accesses out of bounds are found.

    terrazzo sim kernel.txt --interleave adversarial --seed 7
    """
    from terrazzo.check.inputs import random_inputs
    from terrazzo.cli.subject import read
    from terrazzo.errors import CompilerBug, UserError, about
    from terrazzo.interp import kernel as simulator
    from terrazzo.interp.costs import Costs
    from terrazzo.interp.torch import call_numpy, to_numpy
    from terrazzo.ir.dialects import loop as l
    from terrazzo.ir.places import HEAD, Places
    from terrazzo.ir.show_expr import show_list
    from terrazzo.ir.show_kernel import statement
    from terrazzo.pipelines import dialect

    places = Places()
    program = read(file, places=places)
    counted = Costs() if costs else None
    with places.told():
        if dialect(program) != "kernel":
            with about(HEAD):
                raise UserError(f"this is {dialect(program)} IR; the simulator runs kernel IR")
        inputs = {name: to_numpy(value) for name, value in random_inputs(program).items()}
    for n in range(runs if interleave is Interleave.adversarial else 1):
        chosen = seed + n if interleave is Interleave.adversarial else None
        try:
            with places.told():
                results = simulator.run(
                    program, inputs, call=call_numpy, seed=chosen, costs=counted if n == 0 else None
                )
        except CompilerBug as found:
            say(f"{places.tell(found)}", "bold red")
            if chosen is not None:
                say(f"again: terrazzo sim {file} --interleave adversarial --seed {chosen}")
            raise typer.Exit(1) from None
    for b, value in zip(program.results, results, strict=True):
        say(f"{b.name}: {b.type}, {value.size} elements")
    orders = f"{runs} adversarial order{'s' * (runs > 1)}" if interleave is Interleave.adversarial else "the fair order"
    say(f"nothing wrong found, in {orders}", "green")
    if counted is not None:
        rows: list[tuple[str, ...]] = [
            ("statement", "access", "requests", "bytes", "wavefronts", "conflicts", "sectors")
        ]
        for (s, kind), c in counted.accesses.items():
            numbers = (c.requests, c.bytes, c.wavefronts, c.conflicts, c.sectors)
            text = statement(s)[0] if not isinstance(s, l.Load) else f"... {s.buffer.name}[{show_list(s.index)}]"
            rows.append((text, kind, *(str(n) if n else "" for n in numbers)))
        for line in columns(rows, right=(2, 3, 4, 5, 6)):
            say(line)
        say("issued: " + ", ".join(f"{n} {kind}" for kind, n in counted.kinds.items()))
