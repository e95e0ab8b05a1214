"""What depends on frozen inputs alone: computed once, computed again when they change, and never where gradients are
asked for.
"""

from __future__ import annotations

import copy
import gc
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import terrazzo
from terrazzo import UserError
from terrazzo.bench import memory
from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop.memory.frozen import constants, split
from terrazzo.run import compiled as compiled_module
from terrazzo.run import once
from terrazzo.run.compiled import compile_program
from terrazzo.run.misfit import misfit

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")


class Normed(torch.nn.Module):  # type: ignore[misc]
    """A linear layer whose weight is normed, a norm with statistics, and a buffer that a call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(48, 64))
        self.norm = torch.nn.BatchNorm1d(48)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.calls.add_(1)
        weight = self.weight / self.weight.norm(dim=1, keepdim=True)
        return self.norm(torch.nn.functional.linear(x, weight)) + self.calls


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def model() -> Any:
    made = Normed().eval()
    made.norm.running_var.uniform_(0.5, 2)
    return made


def frozen(module: Any, x: Any, cache: Path) -> Any:
    return terrazzo.compile(module, x, options={"freezing": True, "cache_dir": cache})


def labels(plan: Any) -> set[str]:
    return {s.label for s in plan.steps}


def same(run: Any, module: Any, x: Any) -> None:
    calls = module.calls.clone()
    want = module(x)
    module.calls.copy_(calls)
    torch.testing.assert_close(run(x), want)


def test_computed_once(cache: Path) -> None:
    """What is made of weights alone is computed at the first call, and not at the second."""
    module, x = model(), torch.randn(8, 64)
    run = frozen(module, x, cache)
    plain = terrazzo.compile(module, x, options={"cache_dir": cache}).compiled
    once = run.compiled.once
    assert plain.once is None and once.bytes == 0
    assert labels(once.compiled.plan) and not labels(once.compiled.plan) & labels(run.compiled.plan)
    same(run, module, x)
    assert once.bytes >= module.weight.numel() * 4
    with patch.object(once, "_make", side_effect=AssertionError("computed again")):
        same(run, module, 2 * x)
    assert module.calls == 2  # which a call changes, so it is no constant


def test_from_the_cache(tmp_path: Path) -> None:
    """Both plans are kept; where one of them is gone or damaged, both are made again."""
    module, x = model(), torch.randn(8, 64)
    assert frozen(module, x, tmp_path).compiled.program is not None
    again = frozen(module, x, tmp_path)
    assert again.compiled.program is None and again.compiled.once
    same(again, module, x)
    (kept,) = tmp_path.rglob("*.once")
    kept.write_bytes(kept.read_bytes()[:-1])
    third = frozen(module, x, tmp_path)
    assert third.compiled.program is not None
    assert "the plan in the cache is of another program" in str(third.compiled.log.events[-1].reason)
    same(third, module, x)


def plans(tmp_path: Path) -> Any:
    run = frozen(model(), torch.randn(8, 64), tmp_path).compiled
    return run.plan, run.once.compiled.plan


def test_a_plan_of_other_inputs(tmp_path: Path) -> None:
    """What is computed once must be made of this program's inputs."""
    module, x = model(), torch.randn(8, 64)
    program = capture(module, (x,)).program
    plan, once = plans(tmp_path)
    assert misfit(plan, program, once) == ""
    assert misfit(plan, program) == "its inputs are others"
    odd = replace(once, slots=tuple(replace(s, name=f"{s.name}_") for s in once.slots))
    assert misfit(plan, program, odd) == "what is computed once has other inputs"


def step(module: Any) -> None:
    optimizer = torch.optim.SGD([module.weight], lr=0.5)
    module.weight.grad = torch.randn_like(module.weight)
    optimizer.step()


def loaded(module: Any) -> None:
    module.load_state_dict(model().state_dict())


def in_inference_mode(module: Any) -> None:
    with torch.inference_mode():
        module.weight.mul_(torch.rand_like(module.weight))


def written(module: Any) -> None:
    with torch.no_grad():
        module.norm.running_var[3:5] = 7


@pytest.mark.parametrize("change", [step, loaded, in_inference_mode, written])
@pytest.mark.parametrize("through", ["terrazzo", "torch"])
def test_changes_are_seen(cache: Path, change: Any, through: str) -> None:
    """Whatever PyTorch counts; and what is kept stays where it was, for graphs that have captured where that is."""
    module, x = model(), torch.randn(8, 64)
    with torch.no_grad(), seen() as made:
        run = frozen(module, x, cache) if through == "terrazzo" else compiled(module, cache)
        same(run, module, x)
        (once,) = [c.once for c in made if c.once] if through == "torch" else [run.compiled.once]
        ((values,),) = ([m.values for m in once.made.values()],)
        before = [t.data_ptr() for t in values], [t.clone() for t in values]
        change(module)
        same(run, module, x)
        ((values,),) = ([m.values for m in once.made.values()],)
        assert [t.data_ptr() for t in values] == before[0]
        assert not all(map(torch.equal, values, before[1]))


def compiled(module: Any, cache: Path) -> Any:
    return torch.compile(module, backend="terrazzo", options={"freezing": True, "cache_dir": cache, "strict": True})


@contextmanager
def seen() -> Iterator[list[Any]]:
    """Notes the compiled programs that are made within it."""
    made: list[Any] = []
    before = compiled_module.Compiled.__post_init__

    def noted(self: Any) -> None:
        before(self)
        made.append(self)

    with patch.object(compiled_module.Compiled, "__post_init__", noted):
        yield made


def test_changes_that_pytorch_does_not_count(cache: Path) -> None:
    """They are not seen, as the option says; any change that is counted has all seen."""
    module, x = model(), torch.randn(8, 64)
    run = frozen(module, x, cache)
    before = run(x) - module.calls
    module.weight.data.mul_(-1)
    torch.testing.assert_close(run(x) - module.calls, before)
    with torch.no_grad():
        module.weight.add_(0)
    same(run, module, x)


def test_other_memory(cache: Path) -> None:
    """A parameter that is given other memory is seen under torch.compile, which reads parameters at every call."""
    module, x = model(), torch.randn(8, 64)
    with torch.no_grad():
        run = compiled(module, cache)
        same(run, module, x)
        module.weight.data = torch.randn(48, 64)
        same(run, module, x)
        module.weight = torch.nn.Parameter(torch.randn(48, 64))
        same(run, module, x)


@pytest.mark.filterwarnings("ignore:terrazzo. sizes")
def test_sizes_that_vary(cache: Path) -> None:
    """Each size is a program of its own, in which weights are frozen too."""
    module = model()
    with torch.no_grad(), seen() as made:
        run = compiled(module, cache)
        for count in (8, 5, 6):
            same(run, module, torch.randn(count, 64))
    assert len([c for c in made if c.once]) == 3


def test_training_never_freezes(cache: Path) -> None:
    """Where gradients are asked for, weights change at every step."""
    module, x = model().train(), torch.randn(8, 64)
    with seen() as made:
        run = compiled(module, cache)
        other = copy.deepcopy(module)
        for _ in range(3):
            for m, call in ((module, run), (other, other)):
                m.zero_grad()
                call(x).square().sum().backward()
                torch.optim.SGD(m.parameters(), lr=0.1).step()
    assert len(made) == 2 and not any(c.once for c in made)
    torch.testing.assert_close(module.weight, other.weight)


PRODUCT = """
@loop
def f(x: f32[4, 8], w: f32[8, 6]):
    with kernel("e", e=f32[8, 6]):
        for a0 in free(8):
            for a1 in free(6):
                in0 = w[a0, a1]
                v0 = exp(in0)
                e[a0, a1] = v0
    with kernel("y", y=f32[4, 6]):
        for a0 in free(4):
            for a1 in free(6):
                for r0 in reduce(8):
                    in0 = x[a0, r0]
                    in1 = e[r0, a1]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                y[a0, a1] = acc0
    return (y,)
"""


def product(cache: Path) -> Any:
    return compile_program(parse(PRODUCT), {}, Options(cache_dir=cache, frozen=("w",)), "cpu")


def test_several_sets_of_weights(cache: Path) -> None:
    """Layers may share a program: each has its own, as long as it is there."""
    run, x = product(cache), torch.randn(4, 8)
    ws = [torch.randn(8, 6) for _ in range(3)]
    for _ in range(2):
        for w in ws:
            torch.testing.assert_close(run([x, w])[0], x @ w.exp())
    assert len(run.once.made) == 3 and run.once.bytes == 3 * 8 * 6 * 4
    del ws, w
    gc.collect()
    assert run.once.bytes == 0
    for _ in range(3):  # another tensor may come to lie where one was
        w = torch.randn(8, 6)
        torch.testing.assert_close(run([x, w])[0], x @ w.exp())
        del w


def test_tensors_without_a_count(cache: Path) -> None:
    """Tensors made in inference mode have no count of changes; another tensor is another."""
    run, x = product(cache), torch.randn(4, 8)
    with torch.inference_mode():
        w = torch.randn(8, 6)
        torch.testing.assert_close(run([x, w])[0], x @ w.exp())
    v = torch.randn(8, 6)
    torch.testing.assert_close(run([x, v])[0], x @ v.exp())
    torch.testing.assert_close(run([x, w])[0], x @ w.exp())
    with torch.no_grad():
        v.add_(1)
    torch.testing.assert_close(run([x, v])[0], x @ v.exp())


def test_several_threads(cache: Path) -> None:
    run, wrong = product(cache), []
    ws = [torch.randn(8, 6) for _ in range(4)]

    def caller(number: int) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        for k in range(40):
            w = ws[(number + k) % 4]
            if not torch.allclose(run([x, w])[0], x @ w.exp(), atol=1e-4):
                wrong.append((number, k))

    threads = [threading.Thread(target=caller, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(run.once.made) == 4


def test_within_a_captured_graph(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed while a graph is captured is there only when that is replayed: nothing of it is kept."""
    run, x, w = product(cache), torch.randn(4, 8), torch.randn(8, 6)
    monkeypatch.setattr(type(run.machine), "capturing", lambda self: True)
    torch.testing.assert_close(run([x, w])[0], x @ w.exp())
    assert not run.once.made


def test_what_a_captured_graph_reads_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the weights it was made of, and no program; to the end, where it was made of none."""
    run, x, w = product(cache), torch.randn(4, 8), torch.randn(8, 6)
    run([x, w])
    monkeypatch.setattr(type(run.machine), "capturing", lambda self: True)
    run([x, w])
    (values,) = [weakref.ref(t) for made in run.once.made.values() for t in made.values]
    del run
    gc.collect()
    assert values() is not None
    del w
    gc.collect()
    assert values() is None
    alone = [torch.ones(3)]
    once._outlive(alone, [])
    assert any(kept is alone for kept in once._KEPT)


def test_copies_have_their_own(cache: Path) -> None:
    module, x = model(), torch.randn(8, 64)
    run = frozen(module, x, cache)
    other = copy.deepcopy(run)
    first = other(x)
    with torch.no_grad():
        module.weight.mul_(torch.rand_like(module.weight))
    module.calls.zero_()
    assert not torch.allclose(run(x), first)
    torch.testing.assert_close(other(x) - 1, first)


def test_memory_is_counted(cache: Path) -> None:
    """What is kept counts as memory of the model."""
    module, x = model(), torch.randn(8, 64)
    made = []
    kept = memory._kept(lambda: made.append(frozen(module, x, cache)) or made[-1](x), module)
    assert kept >= made[0].compiled.once.bytes > 0


def test_nothing_grows(cache: Path) -> None:
    """Weights of int8 stay what they are: their floats, of four times the bytes, are made on the way."""
    scale = torch.rand(6, 1)

    def call(x: Any, q: Any) -> Any:
        return x @ (q.float() * scale.exp()).t()

    x, q = torch.randn(4, 64), torch.randint(-9, 9, (6, 64), dtype=torch.int8)
    run = terrazzo.compile(call, x, q, options={"frozen": ["q"], "freezing": True, "cache_dir": cache})
    exact = x.double() @ (q.double() * scale.double().exp()).t()
    torch.testing.assert_close(run(x, q).double(), exact, rtol=1e-5, atol=1e-4)  # sums of 64 numbers of about 10
    assert run.compiled.once.bytes == scale.numel() * 4


@pytest.mark.filterwarnings("ignore:terrazzo. aten.")
def test_random_numbers_are_drawn_anew(cache: Path) -> None:
    w = torch.rand(64)

    def call(x: Any) -> Any:
        return x + torch.bernoulli(w) * w.exp()

    run = terrazzo.compile(call, torch.zeros(64), options={"freezing": True, "cache_dir": cache})
    assert run.compiled.once.bytes == 0
    assert len({tuple(run(torch.zeros(64)).tolist()) for _ in range(4)}) > 1


def test_results_of_weights_alone(cache: Path) -> None:
    """A result that is computed once is a tensor of its own at every call."""
    w = torch.rand(64)
    run = terrazzo.compile(lambda x: (w.exp(), x + 1), torch.zeros(64), options={"freezing": True, "cache_dir": cache})
    first, _ = run(torch.zeros(64))
    first.zero_()
    torch.testing.assert_close(run(torch.zeros(64))[0], w.exp())


def test_a_name_that_no_input_has(cache: Path) -> None:
    with pytest.raises(UserError, match="option frozen: f has no input 'v'"):
        compile_program(parse(PRODUCT), {}, Options(cache_dir=cache, frozen=("v",)), "cpu")


def test_what_depends_on_frozen_inputs_alone() -> None:
    program = parse(PRODUCT)
    assert isinstance(program, l.Program)
    assert [b.name for b in sorted(constants(program, ["w"]), key=lambda b: b.name)] == ["e", "w"]
    assert split(program, ["x"]) == (None, program) == split(program, [])
    first, rest = split(program, ["w"])
    assert [b.name for b in (*first.inputs, *first.results)] == ["w", "e"]
    assert [b.name for b in rest.inputs] == ["x", "w", "e"] and [s.name for s in rest.steps] == ["y"]


def test_parts_of_weights_are_stored_once() -> None:
    """Where a weight's parts cost a call nothing, they are stored; otherwise they are made on the way to 128 rows."""
    x, w = torch.zeros(128, 3584), torch.zeros(3584, 3584)
    program = capture(lambda x, w: x @ w.t(), (x, w)).program
    options = Options(target="sm_90a", fp32="split", libraries="never")
    for names, stored in (((), False), (("w",), True)):
        done = lowering(program, replace(options, frozen=names)).at("kernel")
        first, rest = split(done, names)
        assert bool(first) == stored
        assert stored == any(b.name == "w_1" for s in rest.steps for b in s.reads)
    assert [b.name for b in first.results] == ["w_root", "w_least", "w_1", "w_2"]


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_on_a_gpu(cache: Path, graph: bool) -> None:
    """A captured graph reads what is kept where it lies, so it sees a weight that changed as soon as a call did; other
    streams see it too.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    layer, x = torch.nn.Linear(512, 1024, bias=False, device="cuda"), torch.randn(256, 512, device="cuda")
    options = {"freezing": True, "graph": graph, "libraries": "never", "fp32": "split", "cache_dir": cache}
    run = terrazzo.compile(layer, x, options=options)
    assert run.compiled.once.bytes == 0

    def right(found: Any) -> bool:
        exact = x.double() @ layer.weight.double().t()
        return bool((found.double() - exact).norm() < 1e-6 * exact.norm())

    captured = torch.cuda.CUDAGraph()
    with torch.no_grad():
        assert right(run(x)) and run.compiled.once.bytes >= 4 * layer.weight.numel()
        with torch.cuda.graph(captured):
            out = run(x)
        captured.replay()
        assert right(out)
        layer.weight.mul_(torch.rand_like(layer.weight))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = run(x)
        torch.cuda.current_stream().wait_stream(side)
        captured.replay()
        torch.cuda.synchronize()
        assert right(found) and right(out)


@pytest.mark.gpu
def test_captured_before_anything_is_kept(cache: Path) -> None:
    """Parts are made anew in every replay then."""
    w, x = torch.randn(1024, 512, device="cuda"), torch.randn(256, 512, device="cuda")
    options = {"freezing": True, "libraries": "never", "fp32": "split", "cache_dir": cache}
    run = terrazzo.compile(lambda x: x @ w.t(), x, options=options)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = run(x)
    assert run.compiled.once.bytes == 0
    for _ in range(2):
        w.normal_()
        captured.replay()
        exact = x.double() @ w.double().t()
        assert (out.double() - exact).norm() < 1e-6 * exact.norm()
