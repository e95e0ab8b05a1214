"""Kernels under the schedules that the user pinned to them, unjudged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from terrazzo.errors import UserError, about
from terrazzo.hw.gpu import Gpu
from terrazzo.hw.products import matrix
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.sites import product
from terrazzo.rules.loop_to_tile.candidate import Candidate, Chosen
from terrazzo.rules.loop_to_tile.chains.few_rows import pinned_frames, share_rows
from terrazzo.rules.loop_to_tile.reductions import reductions
from terrazzo.rules.loop_to_tile.reductions.split import pinned_split
from terrazzo.rules.loop_to_tile.walked.collapse import collapse, flat_reductions, merge_product_axes


def forms(kernel: l.Kernel) -> list[l.Kernel]:
    """A kernel as it is, and as it is when a schedule is chosen for it."""
    p = product(kernel)
    merged = [merge_product_axes(kernel, p.sites)] if p else []
    return [kernel, *merged, share_rows(kernel), flat_reductions(kernel), collapse(kernel)]


def as_pinned(forms: Sequence[l.Kernel], pinned: Mapping[str, Schedule], gpu: Gpu) -> Chosen:
    """The first form of a kernel that its pinned schedule fits; UserError where there is none."""
    chosen = pinned[forms[0].name]
    if chosen.target != gpu.arch:
        with about(*chosen.part()):
            raise UserError(f"the schedule of {chosen.kernel} is one for {chosen.target}, and the target is {gpu.arch}")
    for site in chosen.sites:
        with about(*chosen.part(site.names[0], "on", site.instruction or "")):
            matrix(site.instruction)
    why = []
    for kernel in forms:
        try:
            tile.fit(chosen, kernel)
        except UserError as e:
            why.append(e)
            continue
        return kernel, chosen, "pin", "by the user"
    with about(*why[0].about, *chosen.part()):
        raise UserError(f"the schedule of {chosen.kernel} does not fit it: {why[0]}")


def in_two(done: Chosen, gpu: Gpu) -> Candidate:
    """A kernel as it was pinned: as two, where the schedule binds an axis that is reduced to the grid; UserError where
    the rest of it fits no piece.
    """
    kernel, chosen, rule, reason = done
    framed = pinned_frames(kernel, chosen)
    found = framed or pinned_split(kernel, chosen)
    if found is None:
        return Candidate((done,))
    first, bound, second = found
    try:
        tile.fit(bound, first)
    except UserError as why:
        with about(*why.about, *chosen.part()):
            raise UserError(f"the schedule of {kernel.name} does not fit a piece that blocks share: {why}") from why
    rest = (second, reductions.finish(second, gpu), "finish", "partial states meet, in order")
    rewrite = "split_frames" if framed else "split"
    return Candidate(((first, bound, rule, reason), rest), ((rewrite, kernel, (first, second)),))
