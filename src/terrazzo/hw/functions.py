"""The functions of CUDA that kernels call, by the names that statements and terms of Kernel IR have for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from terrazzo.hw import barrier, tma, wgmma
from terrazzo.hw.ldmatrix import MatrixMove, move
from terrazzo.hw.movmatrix import TURN
from terrazzo.hw.products import Matrix, matrix
from terrazzo.hw.transfer import CP_ASYNC, REMOTE, SHUFFLE, VOTE, WIDE


def record(name: str) -> Matrix | MatrixMove:
    """The record of an instruction of warps; UserError names the known ones."""
    return move(name) if name.startswith(("ldmatrix", "stmatrix")) else matrix(name)  # type: ignore[return-value]


def _instruction(name: str, *how: Any) -> str:
    found: Any = record(name)
    return str(found.cuda(*how))


FUNCTIONS: dict[str, str | Callable[..., str]] = {
    "ld/st": WIDE.cuda,
    "shuffle": SHUFFLE.cuda,
    "vote": VOTE.cuda,
    "movmatrix": TURN.cuda,
    "remote": REMOTE.cuda,
    "cp.async": CP_ASYNC.cuda,
    "mbarrier": barrier.MBARRIERS,
    "cluster": barrier.CLUSTER,
    "named": barrier.NAMED,
    "proxy": barrier.PROXY,
    "registers": barrier.REGISTERS,
    "bulk": tma.STORES,
    "elected": tma.ELECTED,
    "wgmma": wgmma.DESCRIPTOR + wgmma.GROUPS,
    "tma_load": tma.load_function,
    "tma_store": tma.store_function,
    "instruction": _instruction,
}
"""In the order of a source. One that is made for something is a function of that."""


def texts(called: Iterable[tuple[Any, ...]]) -> list[str]:
    """The functions that are called, each once: (name, what it is made for)."""
    found: list[str] = []
    given = list(dict.fromkeys(called))
    for name, text in FUNCTIONS.items():
        uses = [use[1:] for use in given if use[0] == name]
        if isinstance(text, str):
            found += [text] if uses else []
        else:
            found += [text(*use) for use in (uses if name == "instruction" else sorted(uses))]
    return list(dict.fromkeys(found))
