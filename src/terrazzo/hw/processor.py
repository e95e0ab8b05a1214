"""This machine's processor, by what Linux says of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

BFLOAT16 = frozenset(("avx512_bf16", "amx_bf16"))
"""Features with which products of bfloat16 take half the time of float32, or an eighth, as /proc/cpuinfo calls them."""


@functools.cache
def told() -> Mapping[str, str]:
    """What /proc/cpuinfo says of the first processor; nothing where there is no such file."""
    found: dict[str, str] = {}
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        # The first paragraph is the first processor's; those of the others, there can be hundreds, repeat it.
        for line in itertools.takewhile(str.strip, file):
            name, _, value = line.partition(":")
            found[name.strip()] = value.strip()
    return MappingProxyType(found)


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies numbers in bfloat16 faster than in float32."""
    return not BFLOAT16.isdisjoint(told().get("flags", "").split())
