"""Every rewrite below Torch IR is tested by what it says of itself, and alone, on random programs: nobody writes a test
for a rule.

The example in its docstring: text before and after, and the same meaning on random inputs. Alone: over random programs
it must fire somewhere, and whatever it makes of them means the same. Whatever passes record must be one of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from tests.fuzz.programs import tensor_programs
from tests.harness import assert_round_trip, random_inputs, run
from tests.rules.catalog import CATALOG
from tests.rules.patterned import alone, seasoned

from terrazzo.check.judge import difference
from terrazzo.check.replay import silent, steps_of
from terrazzo.errors import Limitation, UserError
from terrazzo.interp import kernel as simulator
from terrazzo.interp import torch as aten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import tile
from terrazzo.ir.program import Program
from terrazzo.ir.text import parse, show
from terrazzo.ir.verify import verify
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rewrite.rule import Log

often = settings(
    max_examples=40, phases=(Phase.generate,), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def example(doc: str, name: str) -> tuple[str, str]:
    """The texts before and after the `=>` of a docstring."""
    assert "=>" in doc, f"{name} has no example: write `before => after` in its docstring"
    before, after = doc.split("\n=>\n")
    return before[before.index("@") :].strip() + "\n", after.strip() + "\n"


def results(program: Any, inputs: dict[str, Any], precise: bool) -> list[Any]:
    """What a program of any IR gives."""
    if isinstance(program, tile.Program):
        program = program.loop
    if isinstance(program, k.Program):
        return simulator.run(program, inputs, call=aten.call_numpy)
    if isinstance(program, Program) and program.dialect == "torch":
        return [
            aten.to_numpy(x)
            for x in aten.run(program, {n: aten.from_numpy(x) for n, x in inputs.items()}, precise=precise)
        ]
    return run(program, inputs, precise=precise, call=aten.call_numpy)


def assert_same(before: Any, after: Any, seed: int = 0) -> None:
    """Both programs mean the same on random inputs, up to rounding; in float64, wherever that can be computed, too."""
    source = before.loop if isinstance(before, tile.Program) else before
    inputs = random_inputs(source.inputs, seed)
    old, new, exact = results(source, inputs, False), results(after, inputs, False), results(source, inputs, True)
    again = [None] * len(new) if isinstance(after, k.Program) else results(after, inputs, True)
    kinds = [b.type.dtype for b in source.results]
    for values in zip(kinds, old, new, exact, again, strict=True):
        assert difference(*values) == "", f"{show(before)}\n=>\n{show(after)}"


@pytest.mark.parametrize("name", CATALOG)
def test_example(name: str) -> None:
    before, after = example(CATALOG[name].doc, name)
    program = parse(before)
    found = CATALOG[name].apply(program)
    assert show(found) == after
    verify(found, name)
    for p in (program, found):
        assert_round_trip(p) if not isinstance(p, k.Program | tile.Program) else None
    for seed in range(3):
        assert_same(program, found, seed)


@pytest.mark.parametrize("name", [n for n in CATALOG if not n.startswith("torch_to_tensor")])
def test_alone_on_random_programs(name: str) -> None:
    fired = []

    @often
    @given(tensor_programs(steps=3, opaque=False))
    def check(program: Program) -> None:
        try:
            before, after = alone(name, program)
        except (Limitation, UserError):  # such as a scan along an axis that no schedule binds
            return
        if after != before:
            fired.append(name)
            verify(after, name)
            assert_same(before, after)

    check()
    assert fired, f"{name} fires in no random program"


@pytest.mark.parametrize("target", ["interpreter", "sm_90a"])
def test_passes_record_what_they_do_under_names_of_the_catalog(target: str) -> None:
    seen = set()

    @often
    @given(tensor_programs(steps=5, opaque=False))
    def check(program: Program) -> None:
        log = Log(applications=[])
        try:
            done = lowering(seasoned(program), Options(target=target), log)
        except (Limitation, UserError):
            return
        names = {f"{a.pass_name}:{a.rule}" for a in log.applications or []}
        assert not (unknown := names - CATALOG.keys()), f"{unknown}: add these to tests/rules/catalog.py"
        seen.update(names)
        before, known = steps_of(done.source), {x for a in log.applications or [] for x in a.after}
        for p, after, _ in done.stages:
            assert not silent(p.name, before, steps_of(after), known | {*before}), (
                f"{p.name} does not record what it does (`log.applied`)"
            )
            before = steps_of(after)

    check()
    assert {"fuse:view", "fuse:inline"} <= seen
