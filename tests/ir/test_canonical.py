"""Canonical forms: equal up to names is one form, and names that would meet are left alone."""

from __future__ import annotations

import pytest

from terrazzo.errors import UserError
from terrazzo.ir.canonical import canonical, twin, words
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import lowering

TEXT = """@loop
def f(x: f32[6, 40], y: f32[40]):
    with kernel('z', z=f32[6]):
        for a0 in free(6):
            for r0 in reduce(40):
                in0 = x[a0, r0]
                in1 = y[r0]
                v0 = mul(in0, in1)
                acc0 <- max(v0)
            z[a0] = acc0
    return (z,)
"""


def renamed(**names: str) -> str:
    text = TEXT
    for old, new in names.items():
        text = text.replace(f"{old}: f32", f"{new}: f32").replace(f"= {old}[", f"= {new}[")
    return text


def test_forms_differ_in_more_than_names_or_not_at_all() -> None:
    (one,) = parse(TEXT).steps
    (other,) = parse(
        renamed(x="view_17", y="x").replace("'z', z=", "'z_3', z_3=").replace(" z[", " z_3[").replace("(z,)", "(z_3,)")
    ).steps
    (third,) = parse(TEXT.replace("max", "min")).steps
    assert one is not other and canonical(one).kernel is canonical(other).kernel
    assert canonical(one).kernel is not canonical(third).kernel
    for kernel in (one, other, third):
        form = canonical(kernel)
        assert form.named(form.kernel) is kernel


@pytest.mark.parametrize("name", ["x", "t3", "x_s", "view_1"])
def test_what_was_made_for_a_form_is_what_is_made_for_a_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = parse(renamed(x=name))
    shared = lowering(program, Options(target="sm_90a"))
    monkeypatch.setattr("terrazzo.ir.canonical.Form.clashes", lambda *_: True)
    alone = lowering(program, Options(target="sm_90a"))
    assert shared.at("kernel") == alone.at("kernel") and shared.at("tile") == alone.at("tile")
    assert parse(show(shared.at("kernel"))) == shared.at("kernel")


def test_names_that_meet_others_are_left_alone() -> None:
    met = words(lowering(parse(TEXT), Options(target="sm_90a")).at("kernel").steps)
    assert {"x", "y", "z"} <= met
    for name in sorted(met - {"x", "y", "z"}):
        try:
            program = parse(renamed(x=name))
        except UserError:  # no tensor is called so
            continue
        (kernel,) = lowering(program, Options(target="sm_90a")).at("kernel").steps
        assert twin(kernel) is kernel
        assert parse(show(lowering(program, Options(target="sm_90a")).at("kernel"))).steps == (kernel,)
