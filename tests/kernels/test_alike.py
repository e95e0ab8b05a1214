"""Teams that do the same share their text in CUDA: for each of them it means what its role in Kernel IR says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.kernels.arrangements import TMA, Product
from tests.kernels.test_arrangements import derived, right

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import Var
from terrazzo.ir.node import substitute
from terrazzo.targets.cuda.alike import TEAM, alike
from terrazzo.targets.cuda.emit import _Writer, emit

BESIDE = Product(shape=(320, 128, 192), tile=(128, 64, 64), groups=2, roles=True, persistent=2, staged=TMA)
CASES = {
    "beside each other": BESIDE,
    "in a cluster": replace(BESIDE, shape=(512, 128, 192), cluster="m"),
    "from registers": replace(BESIDE, shape=(384, 128, 192), staged=""),
    "in turns": Product(shape=(1024, 64, 320), roles=True, persistent=2, turns=2, staged=TMA),
    "three": Product(shape=(384, 64, 192), tile=(192, 64, 64), groups=3, roles=True, registers=None),
    "three that are short of registers": Product(shape=(384, 64, 192), tile=(192, 64, 64), groups=3, roles=True),
}


def launched(text: str) -> k.Kernel:
    (kernel,) = (s for s in derived(text).steps if isinstance(s, k.Kernel))
    return kernel


def apart(kernel: k.Kernel) -> k.Kernel:
    """A kernel whose shared text is written out again for every team."""
    body = []
    for s in kernel.body:
        team = Var(TEAM, s.count // 4) if isinstance(s, k.Role) and s.first else None
        for n in range(team.extent if team else 0):
            own = tuple(substitute(x, {team: n}) for x in s.body)
            body.append(k.Role(s.first + 4 * n, 4, own, s.registers))
        body += [] if team else [s]
    return k.Kernel(**dict(zip(kernel._fields, kernel.values, strict=True)) | {"body": tuple(body)})


def plain(kernel: k.Kernel) -> str:
    """The CUDA of a kernel without the numbers of its names."""
    return re.sub(r"\b([a-z]+_?)\d+(_mod|_div)?", r"\1\2", _Writer(kernel).source()[1])


@pytest.mark.parametrize("name", CASES)
def test_teams_share_their_text(name: str) -> None:
    kernel = launched(CASES[name].text)
    shared, number = alike(kernel)
    roles = [s for s in kernel.body if isinstance(s, k.Role)]
    assert number == "(warp - 4) / 4" and len(roles) > 2
    assert [(s.first, s.count) for s in shared.body if isinstance(s, k.Role)] == [(0, 4), (4, 4 * (len(roles) - 1))]
    assert plain(apart(shared)) == plain(kernel)
    assert emit(kernel)[1].count("wgmma_wait<0>()") == 1
    right(CASES[name].text)


def test_teams_that_do_different_things_do_not() -> None:
    """Rows of the second one may lie beyond the last, and those of the first may not."""
    kernel = launched(replace(BESIDE, staged="").text)
    assert alike(kernel) == (kernel, "")


def test_roles_are_alternatives() -> None:
    """ptxas knows that the warps of each go together, whichever stand before it."""
    kernel = launched(BESIDE.text)
    roles = [s for s in kernel.body if isinstance(s, k.Role)]
    text = _Writer(kernel).source()[1]
    assert len(roles) == 3 and text.count("} else if (warp >= ") == 2 and text.count("\n  if (warp >= ") == 1
