"""Inputs that a call changes in place: where their new values lie, and what happens where memory is shared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

import terrazzo
from terrazzo.errors import IndexOutOfRange, UserError
from terrazzo.front import dynamo
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.run import compiled, plan
from terrazzo.run.branches import Ahead
from terrazzo.run.compiled import Compiled, compile_program
from terrazzo.run.misfit import shared
from terrazzo.run.updated import Updated

R = torch.randn

MOVING = """
@loop
def f(x: f32[8, 4], y: f32[8, 4]):
    with kernel('z', z=f32[8, 4]):
        for a0 in free(8):
            for a1 in free(4):
                in0 = x[a0, a1]
                in1 = y[a0, a1]
                v0 = add(in0, in1)
                z[a0, a1] = v0
    with kernel('new', new=f32[8, 4]):
        for a0 in free(8):
            for a1 in free(4):
                in0 = x[a0, a1]
                in1 = y[a0, a1]
                v0 = mul(in0, in1)
                new[a0, a1] = v0
    return (z, new)
"""


@pytest.fixture
def moving(tmp_path: Path) -> Compiled:
    found = compile_program(parse(MOVING), {}, Options(target="cpu", cache_dir=tmp_path, updated=("x",), fuse=False))
    assert isinstance(found, Compiled)
    return found


def test_the_new_value_lies_where_the_old_one_did(moving: Compiled) -> None:
    x, y = R(8, 4), R(8, 4)
    where, z, new = x.data_ptr(), x + y, x * y
    assert moving.updated.there and [r.tolist() for r in moving([x, y])] == [z.tolist()]
    assert x.data_ptr() == where and torch.equal(x, new)


@pytest.mark.parametrize("start", [0, 1, 4, 28, 32])
def test_of_memory_that_is_shared_copies_are_used(moving: Compiled, start: int) -> None:
    """As if all was read before anything was written, which is what a program means."""
    memory = R(64)
    x, y = memory[:32].view(8, 4), memory[start : start + 32].view(8, 4)
    z, new = x + y, x * y
    assert moving.updated.shared({moving.plan.inputs[0]: x, moving.plan.inputs[1]: y}) == (
        [*moving.plan.inputs] if start < 32 else []
    )
    for _ in range(2):
        (found,) = moving([x, y])
        assert torch.equal(found, z) and torch.equal(x, new)
        z, new = x + y, x * y


def test_one_tensor_twice(moving: Compiled) -> None:
    x = R(8, 4)
    z, new = x + x, x * x
    (found,) = moving([x, x])
    assert torch.equal(found, z) and torch.equal(x, new)


def test_what_lies_between_is_not_written() -> None:
    """Every other row of a larger tensor."""

    def halved(x: Any) -> Any:
        x.mul_(0.5)
        return x.sum()

    whole = R(16, 4)
    before = whole.clone()
    torch.compile(halved, backend="terrazzo", options={"target": "cpu", "strict": True})(whole[::2])
    assert torch.equal(whole[::2], before[::2] * 0.5) and torch.equal(whole[1::2], before[1::2])


def test_autograd_sees_the_change(tmp_path: Path) -> None:
    def halved(x: Any) -> Any:
        x.mul_(0.5)
        return x * 2

    x, w = R(8), R(8, requires_grad=True)
    call = terrazzo.compile(halved, x.clone(), options={"target": "cpu", "cache_dir": tmp_path})
    y = (x * w).sum()
    before = x._version
    call(x)
    assert x._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_place_out_of_range_leaves_the_input_alone(tmp_path: Path) -> None:
    def put(x: Any, y: Any, place: Any) -> Any:
        x[:, place] = y
        return y + 1

    at = torch.tensor
    call = terrazzo.compile(put, R(4, 8), R(4, 1), at([0]), options={"target": "cpu", "cache_dir": tmp_path})
    x = R(4, 8)
    before = x.clone()
    with pytest.raises(IndexOutOfRange):
        call(x, R(4, 1), at([8]))
    assert torch.equal(x, before)


def test_the_interpreter_does_the_same() -> None:
    x, y = R(8, 4), R(8, 4)
    z, new = x + y, x * y
    found = compile_program(parse(MOVING), {}, Options(target="interpreter", updated=("x",)))([x, y])
    assert torch.equal(found[0], z) and len(found) == 1 and torch.equal(x, new)


def test_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(target="cpu", cache_dir=tmp_path, updated=("x",))
    first = compile_program(parse(MOVING), {}, options)
    monkeypatch.setattr(compiled, "_build", lambda *args: pytest.fail("it is compiled again"))
    second = compile_program(parse(MOVING), {}, options)
    assert second.plan == first.plan and second.updated.there == first.updated.there != frozenset()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("w",), "option updated: f has no input 'w'"),
        (("x", "y", "x"), "f has 2 results, and 3 inputs are named"),
        (("x", "x"), "f has 2 results, and 2 inputs are named"),
    ],
)
def test_what_is_no_new_value_is_an_error(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compile_program(parse(MOVING), {}, Options(target="cpu", updated=names))


def test_another_type_or_what_is_not_named_is_an_error() -> None:
    other = MOVING.replace("y: f32[8, 4]", "y: f32[8, 4], w: f32[4]")
    with pytest.raises(UserError, match=r"w is f32\[4\], and its new value f32\[8, 4\]"):
        compile_program(parse(other), {}, Options(target="cpu", updated=("w",)))
    over = MOVING.replace("new=f32[8, 4]", "new=over(x)")
    with pytest.raises(UserError, match="x is stored over, and not named"):
        compile_program(parse(over), {}, Options(target="cpu"))


def test_plans_that_overwrite_what_is_needed_are_refused(moving: Compiled) -> None:
    made = moving.plan
    names = [s.name for s in made.slots]
    assert plan.Plan.from_json(made.to_json()) == made and shared(made) == ""

    def with_slot(name: str, **fields: Any) -> plan.Plan:
        k = names.index(name)
        return replace(made, slots=(*made.slots[:k], replace(made.slots[k], **fields), *made.slots[k + 1 :]))

    x, y = names.index("x"), names.index("y")
    for wrong in (
        with_slot("new", onto=y),  # whose new value it is not
        with_slot("z", onto=x),
        with_slot("new", shape=(4, 8)),
        replace(made, steps=made.steps[::-1]),  # z is made of the old value
        replace(made, updated=()),
        replace(made, results=(x, *made.results[1:])),
        replace(made, results=(made.results[1],) * 2),
    ):
        assert "lies in the memory of something else" in shared(wrong)
    for odd in (replace(made, updated=(x, x)), replace(made, updated=(names.index("z"),))):
        with pytest.raises(ValueError, match="what is updated is no input"):
            plan.Plan.from_json(odd.to_json())


def test_steps_that_read_the_old_value_are_through_before() -> None:
    """Also where steps run side by side."""
    program = parse(MOVING)
    (x, _), (_, new) = program.inputs, program.results
    entries = {s: plan.Entry("k", s.name, (*s.reads, *s.writes), (1, 32, 0, 0)) for s in program.steps}
    made = plan.make(program, entries, 64, updated=("x",), given={new: x})
    assert made.slots[made.results[1]].onto == made.inputs[0] and shared(made) == ""
    assert Ahead(plan.places_in(made, range(2)))([0], 1)


class Averaged(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Any) -> Any:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.count.add_(1)
        return x - self.mean, self.count * 2


class Stepped(torch.nn.Module):
    """A counter that is branched on: a graph gives it back, which it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("ring", torch.zeros(4, 6))

    def forward(self, x: Any) -> Any:
        self.steps += 1
        self.ring[self.steps % 4] = x[0]
        return x / (1 + self.steps), self.ring.sum()


def viewed(x: Any, y: Any) -> Any:
    x[0].add_(1)
    y.t().mul_(2)
    return x[1], y.sum(), x


def both_ways(x: Any, y: Any) -> Any:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return x + y


def given_back(x: Any, y: Any) -> Any:
    z = x + y
    x.copy_(z)
    return z, z[0], x.view(-1)


def old_kept(x: Any, y: Any) -> Any:
    old = x.clone()
    x.add_(y)
    y.copy_(old)
    return old, x * 2


def token(cache: Any, k: Any, at: Any) -> Any:
    cache.index_copy_(2, at, k)
    return cache.sum(-1), cache


def one_after_the_other(x: Any, y: Any) -> Any:
    x.add_(1)
    y.mul_(2)
    return x.sum()


def overlapping() -> tuple[Any, ...]:
    memory = R(12)
    return memory[:8], memory[4:]


AT = torch.tensor([3])
CALLS: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
    "buffers": (Averaged, lambda: (R(4, 6),)),
    "steps": (Stepped, lambda: (R(4, 6),)),
    "views": (lambda: viewed, lambda: (R(4, 4), R(4, 4))),
    "both ways": (lambda: both_ways, lambda: (R(4, 4), R(4, 4))),
    "given back": (lambda: given_back, lambda: (R(4, 4), R(4, 4))),
    "old kept": (lambda: old_kept, lambda: (R(4, 4), R(4, 4))),
    "a cache": (lambda: token, lambda: (R(2, 3, 8, 4), R(2, 3, 1, 4), AT)),
    "a cache that is turned": (lambda: token, lambda: (R(2, 8, 3, 4).transpose(1, 2), R(2, 3, 1, 4), AT)),
    "a part of a larger cache": (lambda: token, lambda: (R(2, 2, 3, 8, 4)[:, 1], R(2, 3, 1, 4), AT)),
    "overlapping": (lambda: one_after_the_other, overlapping),
    "the same twice": (lambda: one_after_the_other, lambda: (R(8),) * 2),
    "apart": (lambda: one_after_the_other, lambda: (R(8), R(8))),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", CALLS)
def test_under_torch_compile(case: str, grad: bool) -> None:
    """Values, who shares memory with whom, and what is written to results afterwards, call after call."""
    make, inputs = CALLS[case]
    fn, args = make(), inputs()
    twin, others = copy.deepcopy((fn, args))
    torch._dynamo.reset()
    call = torch.compile(fn, backend="terrazzo", options={"target": "cpu", "strict": True})
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            ours, theirs = tree_leaves((call(*args), args)), tree_leaves((twin(*others), others))
            torch.testing.assert_close(ours, theirs)
            assert _sharing(ours) == _sharing(theirs)
            for x, y in zip(ours, theirs, strict=True):
                if x.is_floating_point():
                    x.add_(1)
                    y.add_(1)
            if isinstance(fn, torch.nn.Module):
                torch.testing.assert_close(dict(fn.named_buffers()), dict(twin.named_buffers()))


def _sharing(tensors: list[Any]) -> list[list[bool]]:
    places = [x.untyped_storage().data_ptr() for x in tensors]
    return [[x == y for y in places] for x in places]


class Trained(torch.nn.Module):
    """Statistics of batches, and a state that gradients depend on before it is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4)
        self.register_buffer("state", torch.rand(4))

    def forward(self, x: Any) -> Any:
        y = (self.state * 2) * self.linear(self.norm(x))
        self.state.add_(1)
        return y


@pytest.mark.parametrize("again", [False, True])
def test_training_steps_change_their_state(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the backward graph is given the old value, and computes `again` what was made of it."""

    def partition(joint: Any, inputs: Any, *, wide: bool = False, exactly: bool = False, **options: Any) -> Any:
        for node in joint.graph.nodes:
            if node.target == torch.ops.aten.mul.Tensor and node.args[1] == 2:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        return min_cut_rematerialization_partition(joint, inputs, **options)

    seen: list[Any] = []
    compile_it = compiled.compile_program
    monkeypatch.setattr(compiled, "compile_program", lambda *args: seen.append(compile_it(*args)) or seen[-1])
    if again:
        monkeypatch.setattr(dynamo, "partition", partition)
    fn = Trained()
    twin = copy.deepcopy(fn)
    torch._dynamo.reset()
    call = torch.compile(fn, backend="terrazzo", options={"target": "cpu", "strict": True})
    for _ in range(3):
        x = R(5, 6)
        call(x).square().sum().backward()
        twin(x).square().sum().backward()
        torch.testing.assert_close(dict(fn.named_buffers()), dict(twin.named_buffers()))
        gradients = ([p.grad for p in net.parameters()] for net in (fn, twin))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    forward, backward = seen
    assert len(forward.plan.updated) == 4 and not backward.plan.updated
    assert len(forward.updated.there) == (3 if again else 4), "of the old value that is given on a copy is made"


def test_weights_that_change_are_not_frozen() -> None:
    """What depends on a buffer that the graph writes to is computed at every call."""
    fn, twin = Averaged(), Averaged()
    torch._dynamo.reset()
    call = torch.compile(fn, backend="terrazzo", options={"target": "cpu", "freezing": True})
    with torch.no_grad():
        for _ in range(3):
            x = R(4, 6)
            torch.testing.assert_close(call(x), twin(x))


def test_what_was_where_is_asked_again_when_tensors_lie_elsewhere(moving: Compiled) -> None:
    known = Updated(moving.plan)
    first, second = moving.plan.inputs
    x, y = R(8, 4), R(8, 4)
    assert [known.shared({first: a, second: b}) for a, b in ((x, y), (x, x), (x, y), (y, x))] == [
        [],
        [first, second],
        [],
        [],
    ]


def decoded(keys: Any, values: Any, q: Any, k: Any, v: Any, at: Any) -> Any:
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    seen = torch.arange(keys.shape[2], device=keys.device) <= at
    at.add_(1)
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen[None, None, None])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("length", [64, 1024])
def test_on_a_gpu_a_cache_is_written_and_read(mode: str, length: int) -> None:
    """Token after token, each of which sees those before it: kernels that read are launched while those that wrote
    still run, and a graph is launched again with the same memory.
    """
    torch._dynamo.reset()
    caches = [R(2, 4, length, 64, device="cuda").bfloat16() for _ in range(2)]
    ours, theirs = ([*(x.clone() for x in caches), torch.tensor([3], device="cuda")] for _ in range(2))
    call = torch.compile(decoded, backend="terrazzo", mode=mode)
    with torch.no_grad():
        for _ in range(40):
            given = [R(2, 4, 1, 64, device="cuda").bfloat16() for _ in range(3)]
            found, expected = (fn(*x[:2], *given, x[2]) for fn, x in ((call, ours), (decoded, theirs)))
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
            assert all(map(torch.equal, ours, theirs))
