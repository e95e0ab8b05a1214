"""How many steps a warp's access to memory takes: wavefronts of shared memory, sectors of global memory.

Functions take byte addresses [..., lane] and the mask of lanes that take part, and give a number for every warp. The
rules are those of the CUDA programming guide (banks, 32-byte sectors) and of NVIDIA's engineers (lanes that read the
same); 1002 patterns of addresses were held against the counters of an H200, and all agree but two of loads of 16 bytes
by some of the lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BANKS, BANK, SECTOR = 32, 4, 32
"""Banks of shared memory, bytes of a bank, bytes of a sector."""
LINE = BANKS * BANK
"""What banks repeat after, in bytes."""


def wavefronts(addresses: Any, active: Any, size: int, write: bool = False) -> tuple[Any, Any]:
    """(wavefronts, those of them that are bank conflicts) of an access to shared memory of `size` bytes a lane.

    Lanes go in phases of 128 bytes: 32, 16 or 8 lanes for accesses of up to 4, 8 or 16 bytes. A phase takes as many
    wavefronts as the busiest bank has different words. Two phases of a load are one where lanes that differ in bit 0
    (or all those that do in bit 1) read the same. What ncu calls smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared.
    """
    lanes = min(LINE // max(size, BANK), 32)
    each = _phases(addresses, active, size, lanes)
    if write or lanes == 32:
        return each.sum(-1), np.maximum(each - 1, 0).sum(-1)
    both = _phases(addresses, active, size, 2 * lanes)
    alike = _alike(addresses, active, 1, 2 * lanes) | _alike(addresses, active, 2, 2 * lanes)
    apart = each.reshape(*both.shape, 2)
    return (
        np.where(alike, both, apart.sum(-1)).sum(-1),
        np.where(alike, np.maximum(both - 1, 0), np.maximum(apart - 1, 0).sum(-1)).sum(-1),
    )


def matrix_wavefronts(rows: Any, active: Any, matrices: int) -> tuple[Any, Any]:
    """The same for `ldmatrix`: the lanes' addresses are of rows of 16 bytes, of which 8 make a phase."""
    named = active.any(-1, keepdims=True) & (np.arange(32) < 8 * matrices)
    return wavefronts(rows, named, 16, write=True)


def sectors(addresses: Any, active: Any) -> Any:
    """The different sectors of global memory that a warp asks for. l1tex__t_sectors_pipe_lsu_mem_global_op_{ld, st}."""
    return _different(np.where(active, addresses // SECTOR, -1)).sum(-1)


def copied_sectors(source: Any, target: Any, active: Any, size: int) -> Any:
    """Sectors that cp.async asks for. Copies of 16 bytes bypass the first-level cache, and one takes both halves of a
    sector only where
    they go to one sector of shared memory. smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts."""
    if size < 16:
        return sectors(source, active)
    crossed = (source // 16 ^ target // 16) & 1
    key = (source // SECTOR << 24) + (target // SECTOR << 1) + crossed
    return _different(np.where(active, key, -1)).sum(-1)


def _phases(addresses: Any, active: Any, size: int, lanes: int) -> Any:
    """Wavefronts of every phase of so many lanes, [..., phase]."""
    words = np.where(active, addresses // BANK, -1)[..., None] + np.where(
        active[..., None], np.arange(max(size // BANK, 1)), 0
    )
    words = np.sort(words.reshape(-1, lanes * words.shape[-1]), axis=-1)
    phase, at = np.nonzero(_different(words))
    busy = np.bincount(phase * BANKS + words[phase, at] % BANKS, minlength=len(words) * BANKS)
    return busy.reshape(*addresses.shape[:-1], 32 // lanes, BANKS).max(-1)


def _different(values: Any) -> Any:
    """Marks one of each different value along the last axis, in sorted order; negative ones are none."""
    values = np.sort(values, axis=-1)
    first = np.ones(values.shape, bool)
    first[..., 1:] = values[..., 1:] != values[..., :-1]
    return first & (values >= 0)


def _alike(addresses: Any, active: Any, bit: int, lanes: int) -> Any:
    """Whether, within groups of so many lanes, those whose number differs in one bit read the same where both take
    part.
    """
    other = np.arange(32) ^ bit
    same = (addresses == addresses[..., other]) | ~active | ~active[..., other]
    return same.reshape(*same.shape[:-1], 32 // lanes, lanes).all(-1)
