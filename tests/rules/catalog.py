"""Every rewrite below Torch IR by the name its applications are recorded under: its example, and how to apply it alone.

A rewrite that is recorded under a name that is not here fails `test_catalog`, so nobody can forget to have one tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.hw.gpu import gpu
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.node import topological
from terrazzo.rewrite.rule import Choice, Log
from terrazzo.rules import tensor_to_loop
from terrazzo.rules.loop.attention import frames
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.loop.folding import digits, fold
from terrazzo.rules.loop.fusion import fuse, multiplied_once, one_kernel, reduced_already
from terrazzo.rules.loop.layout import (
    across,
    channels,
    dimensions,
    in_place,
    laid_apart,
    layout,
    lookups,
    phases,
    phases_beside,
    pixels,
    placed,
    taps_after,
    turned,
    whole_steps,
)
from terrazzo.rules.loop.memory import beside, combined, divided, gathered, in_windows, places_read, remake, renewed
from terrazzo.rules.loop.precision import narrow, parts, places, relax, sooner, wide_sums
from terrazzo.rules.loop_to_tile import choose
from terrazzo.rules.loop_to_tile.chains import few_rows
from terrazzo.rules.loop_to_tile.products import apart, packed, patches, taps, unpacked, written_out
from terrazzo.rules.loop_to_tile.reductions import mixed, rows, scans_in_pieces, under_taps
from terrazzo.rules.loop_to_tile.reductions import split as splitting
from terrazzo.rules.loop_to_tile.walked import collapse, windows_of_windows
from terrazzo.rules.tensor_to_loop.lift import lift
from terrazzo.rules.tile_to_kernel import lower as deriving
from terrazzo.rules.torch_to_tensor import RULES as LOWERINGS
from terrazzo.rules.torch_to_tensor import loops, pairs, scatters_summed, together
from terrazzo.rules.torch_to_tensor import lower as lowering
from terrazzo.targets import target
from terrazzo.targets.cpu import merged, tables

GPU = gpu("sm_80")
LAUNCHED = replace(target("sm_80").rates, launch=0.0, byte=0.0)
"""Rates of a GPU on which a further kernel costs nothing, nor what it stores, so that small examples are worth one."""

FREE = replace(LAUNCHED, op=0.0, load=0.0)
"""Rates at which nothing but sums takes time."""


@dataclass(frozen=True)
class Rewrite:
    """A rewrite: the docstring that holds its example, and what it makes of a program by itself."""

    doc: str
    apply: Callable[[Any], Any]


def of(function: Callable[..., Any], apply: Callable[[Any], Any]) -> Rewrite:
    """A rewrite whose example is in the docstring of a function."""
    import inspect

    return Rewrite(inspect.getdoc(function) or "", apply)


def fusion(step: str) -> Callable[[l.Program], l.Program]:
    """One of the three kinds of fusion, wherever it is legal."""

    def fused(choice: Choice) -> str:
        return next(name for name in choice.options if name != "apart")

    def apply(program: l.Program) -> l.Program:
        work = fuse._Fusion(program, Log(), Rates(), frozenset(), None, fused)
        getattr(work, step)()
        return work.program()

    return apply


def kernels(rewrite: Callable[[l.Kernel], tuple[l.Kernel, ...]]) -> Callable[[l.Program], l.Program]:
    """A rewrite of every kernel."""

    def apply(program: l.Program) -> l.Program:
        steps = [x for s in program.steps for x in (rewrite(s) if isinstance(s, l.Kernel) else (s,))]
        return l.Program(program.name, program.inputs, tuple(steps), program.results)

    return apply


def points(steps: Sequence[l.Kernel]) -> float:
    """How many points kernels reduce over."""
    found = [x for s in steps for x in s.carried if isinstance(x, l.Reduce)]
    return float(sum(math.prod(a.extent for a in x.axes) for x in found))


def product_axes(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    sites = [contraction(x) for x in topological(kernel.stores) if isinstance(x, l.Reduce)]
    return (collapse.merge_product_axes(kernel, [s for s in sites if s]),) if sites and all(sites) else (kernel,)


def split(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """Split a kernel's one reduction into the fewest pieces there can be."""
    found = list(dict.fromkeys(x for x in topological(kernel.stores) if isinstance(x, l.Reduce)))
    if len(found) != 1 or not found[0].free <= frozenset(kernel.axes):
        return (kernel,)
    last = found[0].axes[-1].extent
    pieces = next((n for n in range(2, last + 1) if last % n == 0), 1)
    return splitting.split(kernel, found, pieces) if pieces > 1 else (kernel,)


def reduced_first(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """The reductions of a kernel that need no other, in a kernel of their own."""
    top = rows.parts(kernel)[2]
    first = [r for r in top if not any(x in top for x in topological(r.args))]
    return splitting.reduced_first(kernel, first) if first else (kernel,)


def split_frames(kernel: l.Kernel) -> tuple[l.Kernel, ...]:
    """Split a chain in a moving frame in two."""
    return few_rows.split_frames(few_rows.share_rows(kernel), 2) or (kernel,)


def updated(program: l.Program) -> list[str]:
    """An input that the last result may be the new value of."""
    return [b.name for b in program.inputs if b.type == program.results[-1].type][:1]


def derive(program: Any) -> Any:
    """Kernels for a GPU; of loops, with the schedules that are chosen for it."""
    return deriving.program(program if isinstance(program, tile.Program) else choose.schedule(program, GPU, Log()), GPU)


CATALOG: dict[str, Rewrite] = {
    "torch_to_tensor:opaque": Rewrite(lowering.opaque.doc, lambda p: lowering.lower(p, LOWERINGS, Log())),
    "torch_to_tensor:complex_as_pairs": of(pairs.complex_as_pairs, lambda p: pairs.complex_as_pairs(p, Log())),
    "torch_to_tensor:sums_together": of(together.sums_together, lambda p: together.sums_together(p, Log(), LAUNCHED)),
    "torch_to_tensor:scatters_summed": of(
        scatters_summed.scatters_summed, lambda p: scatters_summed.scatters_summed(p, Log())
    ),
    "torch_to_tensor:parts_stacked": of(loops.parts_stacked, lambda p: loops.parts_stacked(p, Log())),
    "torch_to_tensor:stacks_whole": of(loops.stacks_whole, lambda p: loops.stacks_whole(p, Log())),
    "torch_to_tensor:products_together": of(
        loops.products_together, lambda p: loops.products_together(p, Log(), LAUNCHED)
    ),
    **{f"tensor_to_loop:{r.name}": Rewrite(r.doc, lift) for r in tensor_to_loop.RULES},
    "fuse:view": of(fuse._Fusion.views, fusion("views")),
    "fuse:inline": of(fuse._Fusion.inlines, fusion("inlines")),
    "fuse:merge": of(fuse._Fusion.merges, fusion("merges")),
    "fuse:fold_indices": of(fold.fold_indices, kernels(lambda k: (fold.fold_indices(k),))),
    "fuse:factors_apart": of(digits.factors_apart, kernels(lambda k: (digits.factors_apart(k),))),
    "fuse:extremes_once": of(fold.extremes_once, kernels(lambda k: (fold.extremes_once(k),))),
    "fuse:reduced_already": of(
        reduced_already.reduced_already, lambda p: reduced_already.reduced_already(p, Log(), Rates())
    ),
    "fuse:rows_gathered": of(gathered.rows_gathered, lambda p: gathered.rows_gathered(p, Log(), Rates())),
    "fuse:recompute": of(fold.fold, lambda p: fold.fold(p, Log())),
    "lookups:store_lookups": of(lookups.store_lookups, lambda p: lookups.store_lookups(p, Log(), LAUNCHED)),
    "lookups:store_beside": of(lookups.store_beside, lambda p: lookups.store_beside(p, Log(), LAUNCHED)),
    "store_as_read:narrow": of(narrow.narrow, lambda p: narrow.narrow(p, Log())),
    "store_as_read:merge_dimensions": of(layout.store_as_read, lambda p: layout.store_as_read(p, Log())),
    "parts:into_parts": of(
        parts.into_parts, lambda p: parts.into_parts(p, Log(), 3, lambda old, new, beaten: (1.0, ""))
    ),
    "store_as_read:pixels_together": of(pixels.pixels_together, lambda p: pixels.pixels_together(p, Log(), often=1)),
    "store_as_read:dimensions_of_products": of(
        dimensions.dimensions_of_products, lambda p: dimensions.dimensions_of_products(p, Log())
    ),
    "store_as_read:channels_last": of(channels.channels_last, lambda p: channels.channels_last(p, Log())),
    "store_as_read:along_results": of(placed.along_results, lambda p: placed.along_results(p, Log())),
    "one_kernel:products_joined": of(
        one_kernel.one_kernel, lambda p: one_kernel.one_kernel(p, Log(), lambda kernel: "", worth=0)
    ),
    "online:copied_after": of(
        placed.copied_after, lambda p: placed.copied_after(p, Log(), lambda k: next(iter(k.axes[::-1]), None))
    ),
    "online:whole_steps": of(whole_steps.whole_steps, lambda p: whole_steps.whole_steps(p, Log(), points)),
    "online:taps_after": of(
        taps_after.taps_after, lambda p: taps_after.taps_after(p, Log(), lambda steps: float(1 - len(steps)))
    ),
    "online:phases_beside": of(
        phases_beside.phases_beside,
        lambda p: phases_beside.phases_beside(p, Log(), lambda steps: float(1 - len(steps))),
    ),
    "online:phases_apart": of(
        phases.phases_apart, lambda p: phases.phases_apart(p, Log(), lambda steps: float(1 - len(steps)))
    ),
    "online:images_in_place": of(
        in_place.images_in_place, lambda p: in_place.images_in_place(p, Log(), lambda steps: float(1 - len(steps)))
    ),
    "online:turned_after": of(
        across.turned_after, lambda p: across.turned_after(p, Log(), lambda steps: 1.0, lambda copy: -1.0, 0)
    ),
    "online:read_across": of(across.read_across, lambda p: across.read_across(p, Log())),
    "online:laid_apart": of(
        laid_apart.laid_apart, lambda p: laid_apart.laid_apart(p, Log(), lambda steps: float(1 - len(steps)), 0)
    ),
    "online:store_turned": of(
        turned.store_turned, lambda p: turned.store_turned(p, Log(), lambda steps: float(1 - len(steps)))
    ),
    "places:round_places": of(places.round_places, lambda p: places.round_places(p, Log())),
    "places:round_differences": of(places.round_differences, lambda p: places.round_differences(p, Log())),
    "wide_sums:wide": of(wide_sums.wide_sums, lambda p: wide_sums.wide_sums(p, Log())),
    "relax:approximate": of(relax.relax, lambda p: relax.relax(p, Log())),
    "remake:store_sooner": of(sooner.store_sooner, lambda p: sooner.store_sooner(p, Log(), FREE, 1, "remake")),
    "parts:multiply_once": of(
        multiplied_once.multiply_once,
        lambda p: multiplied_once.multiply_once(p, Log(), lambda steps: float(1 - len(steps))),
    ),
    "remake:read_beside": of(beside.read_beside, lambda p: beside.read_beside(p, Log(), FREE, (), 1)),
    "remake:combine_sooner": of(combined.combine_sooner, lambda p: combined.combine_sooner(p, Log(), FREE, 0)),
    "remake:divide": of(divided.divide, lambda p: divided.divide(p, Log(), replace(FREE, launch=0.0), 0)),
    "remake:make_again": of(remake.remake, lambda p: remake.remake(p, Log(), FREE, lambda steps: 0.0, 0)),
    "remake:in_windows": of(
        in_windows.in_windows, lambda p: in_windows.in_windows(p, Log(), lambda steps: 1.0, lambda maker: True, 0)
    ),
    "windows:places_read": of(places_read.places_read, lambda p: places_read.places_read(p, Log())),
    "renew:only_changed": of(renewed.renew, lambda p: renewed.renew(p, updated(p), Log())),
    "schedule:collapse": of(collapse.collapse, kernels(lambda k: (collapse.collapse(k),))),
    "schedule:merge_product_axes": of(collapse.merge_product_axes, kernels(product_axes)),
    "schedule:digits_apart": of(collapse.digits_apart, kernels(lambda k: (collapse.digits_apart(k),))),
    "schedule:flat_reductions": of(collapse.flat_reductions, kernels(lambda k: (collapse.flat_reductions(k),))),
    "schedule:merge_axes": of(collapse.merge_axes, kernels(lambda k: (collapse.merge_axes(k, k.axes),))),
    "schedule:merged": of(merged.merged, kernels(lambda k: (merged.merged(k),))),
    "schedule:summed_as_stored": of(merged.summed_as_stored, kernels(lambda k: (merged.summed_as_stored(k),))),
    "schedule:tabled": of(tables.tabled, kernels(lambda k: (*tables.tabled(k)[0], tables.tabled(k)[1]))),
    "schedule:even_products": of(patches.even_products, kernels(lambda k: (patches.even_products(k),))),
    "schedule:rows_apart": of(patches.rows_apart, kernels(lambda k: (patches.rows_apart(k),))),
    "schedule:packed": of(packed.packed, kernels(packed.packed)),
    "schedule:stored_first": of(packed.stored_first, kernels(packed.stored_first)),
    "schedule:products_apart": of(apart.products_apart, kernels(apart.products_apart)),
    "schedule:factor_apart": of(apart.factor_apart, kernels(apart.factor_apart)),
    "schedule:stores_apart": of(apart.stores_apart, kernels(apart.stores_apart)),
    "schedule:results_apart": of(apart.results_apart, kernels(apart.results_apart)),
    "schedule:digits_summed": of(unpacked.digits_summed, kernels(unpacked.digits_summed)),
    "schedule:written_out": of(written_out.written_out, kernels(lambda k: written_out.written_out(k, 1))),
    "schedule:padded": of(packed.padded, kernels(packed.padded)),
    "schedule:in_frames": of(frames.in_frames, kernels(lambda k: (frames.in_frames(k),))),
    "schedule:channels_beside": of(packed.channels_beside, kernels(packed.channels_beside)),
    "schedule:lie_alike": of(mixed.lie_alike, kernels(mixed.lie_alike)),
    "schedule:taps_apart": of(taps.taps_apart, kernels(lambda k: taps.taps_apart(k, 1))),
    "schedule:in_pieces_of_images": of(
        under_taps.in_pieces_of_images, kernels(lambda k: under_taps.in_pieces_of_images(k, 24, 4))
    ),
    "schedule:split": of(splitting.split, kernels(split)),
    "schedule:scanned_in_pieces": of(
        scans_in_pieces.scanned_in_pieces, kernels(lambda k: scans_in_pieces.scanned_in_pieces(k, 2))
    ),
    "schedule:scanned_piece_by_piece": of(
        scans_in_pieces.scanned_piece_by_piece, kernels(lambda k: scans_in_pieces.scanned_piece_by_piece(k, 2))
    ),
    "schedule:windows_of_windows": of(
        windows_of_windows.windows_of_windows, kernels(windows_of_windows.windows_of_windows)
    ),
    "schedule:split_moments": of(splitting.split_moments, kernels(lambda k: splitting.split_moments(k, 2) or (k,))),
    "schedule:reduced_first": of(splitting.reduced_first, kernels(reduced_first)),
    "schedule:share_rows": of(few_rows.share_rows, kernels(lambda k: (few_rows.share_rows(k),))),
    "schedule:split_frames": of(few_rows.split_frames, kernels(split_frames)),
    "derive:derive": of(deriving.lower, derive),
}
