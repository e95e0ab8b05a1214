"""What a program becomes has nothing of the process in it: other processes find its kernels in the cache."""

from __future__ import annotations

import os
import subprocess
import sys

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.expr import Loaded, Var
from terrazzo.ir.program import Input
from terrazzo.ir.show import show
from terrazzo.ir.types import DTYPES, Type, i64
from terrazzo.ir.written import LONG, written

TEXTS = """
import sys
from terrazzo.bench.programs import programs
from terrazzo.front.capture import capture
from terrazzo.ir.dialects.loop import fresh_name
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.run.cuda import emit_all

for _ in range(int(sys.argv[1])):
    fresh_name()
module, inputs = programs()[sys.argv[2]].made("f32", "meta", small=True)
done = lowering(capture(module, inputs, {}).program, Options(target="sm_90a"))
for name, source in emit_all(done.at("kernel"), "sm_90a")[1]:
    print(name, source)
"""


def texts(seed: int, names: int, program: str) -> str:
    """The CUDA of a model program in a process of its own, in which so many names were given away before."""
    command = [sys.executable, "-c", TEXTS, str(names), program]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_a_program_is_the_same_kernels_in_every_process() -> None:
    """What pixels read where data says was added up in the order of addresses."""
    first = texts(1, 0, "lattice_boltzmann")
    assert "__global__" in first
    assert texts(2, 97, "lattice_boltzmann") == first


def test_names_that_variables_have_for_a_while_are_sorted_by_their_numbers() -> None:
    older, newer = Var("$9", 4), Var("$10", 4)
    assert show(newer * 4 + older) == "$9 + $10 * 4"


def test_terms_are_sorted_by_what_they_are() -> None:
    """By their address they were, where they had no text."""
    for value in (k.Value("v1", i64), t.Read(Input("x", Type(i64, (4,))), (Var("i", 4),))):
        assert "object at" not in written(value)
    values = [Loaded(k.Value(f"v{n}", i64), 8) for n in range(8)]
    assert show(sum(v * (n + 1) for n, v in reversed([*enumerate(values)]))).startswith("at(value('v0'")


def test_of_a_long_term_it_matters_which_of_its_names_is_older_and_no_more() -> None:
    def long(first: int) -> l.Term:
        x: l.Term = l.Load(l.Buffer("x", Type(DTYPES["i64"], (4, 4))), (Var(f"${first}", 4), Var(f"${first + 1}", 4)))
        for _ in range(LONG.bit_length()):
            x = l.apply("add", x, x)
        return x

    assert written(long(3)) == written(long(9)) == written(long(98))
