"""What single lanes do: multiply and add, load and store in wide pieces, copy asynchronously, read each other's
registers.

As for matrix instructions, a record says what an instruction computes and how it is written in CUDA; the simulator runs
the one, the emitter writes the other, and the tests compare them on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LaneInstruction:
    """`run` is the meaning, on arrays whose last axis (but for elements of one access) is the lane; `cuda` defines its
    function.

    `since` is the first architecture that has it (80 for sm_80); `rate` how many lanes of a processor do it in a clock,
    at best, for 4 bytes each.
    """

    name: str
    since: int
    rate: int
    run: Callable[..., Any]
    cuda: str


def _fma(a: Any, b: Any, c: Any) -> Any:
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def _wide(memory: Any, at: Any, count: int) -> Any:
    return memory[at[..., None] + np.arange(count)]


def _copy(data: Any, inside: Any) -> Any:
    return np.where(inside[..., None], data, np.zeros((), data.dtype))


def _exchange(held: Any, mask: int) -> Any:
    return held[..., np.arange(32) ^ mask]


FMA = LaneInstruction("fma.f32", 70, 128, _fma, "")
"""a * b + c, rounded once. NVRTC makes it of the product and the sum."""

WIDE = LaneInstruction(
    "ld/st", 70, 32, _wide,
    """template <int bytes> struct tz_wide;
template <> struct tz_wide<1> { using type = u8; };
template <> struct tz_wide<2> { using type = u16; };
template <> struct tz_wide<4> { using type = u32; };
template <> struct tz_wide<8> { using type = uint2; };
template <> struct tz_wide<16> { using type = uint4; };
template <int count, class T> TZ void move(T* to, const T* from) {
  constexpr int bytes = count * sizeof(T), step = bytes < 16 ? bytes : 16;
  using W = typename tz_wide<step>::type;
#pragma unroll
  for (int i = 0; i < bytes / step; i++) reinterpret_cast<W*>(to)[i] = reinterpret_cast<const W*>(from)[i];
}
""",
)  # fmt: skip
"""`count` elements that lie one behind the other, in accesses of up to 16 bytes."""

SHUFFLE = LaneInstruction(
    "shfl.bfly", 70, 32, _exchange,
    """template <class T> TZ T shuffle_xor(T x, int mask) {
  if constexpr (sizeof(T) >= 4) return __shfl_xor_sync(~0u, x, mask);
  else return (T)__shfl_xor_sync(~0u, (int)x, mask);
}
""",
)  # fmt: skip
"""The value of the lane whose number differs in the bits of the mask."""

CP_ASYNC = LaneInstruction(
    "cp.async", 80, 32, _copy,
    """template <int bytes> TZ void cp_async(void* to, const void* from, bool inside = true) {
  const u32 at = shared_address(to);
  const int read = inside ? bytes : 0;
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(read) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(at), "l"(from), "n"(bytes), "r"(read) : "memory");
}
TZ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int open> TZ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(open) : "memory"); }
""",
)  # fmt: skip
"""4, 8 or 16 bytes from global to shared memory, zeros where `inside` is false. They have come when their group was
waited for."""


def _vote(held: Any, kind: str) -> Any:
    found = held.any(axis=-1, keepdims=True) if kind == "any" else held.all(axis=-1, keepdims=True)
    return np.broadcast_to(found, held.shape)


VOTE = LaneInstruction("vote", 70, 32, _vote, """TZ bool vote_any(bool x) { return __any_sync(~0u, x); }
TZ bool vote_all(bool x) { return __all_sync(~0u, x); }
""")  # fmt: skip
"""Whether any lane, or all of them, have a bool."""

REMOTE = LaneInstruction("ld.shared::cluster", 90, 32, lambda x: x, """
template <class T> TZ T remote(const T* at, u32 rank) {
  u64 there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(at), "r"(rank));
  return *reinterpret_cast<const volatile T*>(there);
}
""")  # fmt: skip
"""An element of shared memory of another block of the cluster."""
