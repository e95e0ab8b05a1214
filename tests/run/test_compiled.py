"""Calling what was compiled: from several threads, in a second process, with a damaged cache, with weights that
change.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import terrazzo
from terrazzo import UserError
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.run import compiled as compiled_module
from terrazzo.run import compiler as compiler_module
from terrazzo.run.cache import Cache
from terrazzo.run.compiled import compile_program
from terrazzo.run.interpreted import Interpreted

torch = pytest.importorskip("torch")

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


TARGETS = [pytest.param("cpu", marks=needs_compiler), "interpreter"]


@pytest.fixture
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, running the compiler is an error."""

    def forbidden(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler_module._Builds, "build", forbidden)


# threads


def several(x: Any, w: Any) -> Any:
    """Many temporaries, and one op that PyTorch runs on one of them."""
    y = torch.relu(x @ w) + 1
    values, _ = torch.sort(y, dim=-1)
    return torch.softmax(values * 2, -1), y.sum(0)


@needs_compiler
@pytest.mark.filterwarnings("ignore:terrazzo. aten.sort")
def test_several_threads_may_call_at_the_same_time(cache: Path) -> None:
    """Each call has memory of its own; what was used is used again."""
    torch.manual_seed(0)
    w = torch.randn(24, 40)
    run = terrazzo.compile(several, torch.randn(16, 24), w, options={"cache_dir": cache, "fuse": False, "threads": 1})
    assert run.compiled.plan.arena and [f.op for f in run.compiled.fallbacks] == ["aten.sort.default"]
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def caller(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        try:
            inputs = [torch.randn(16, 24, generator=generator) for _ in range(40)]
            start.wait(30)
            for x in inputs:
                torch.testing.assert_close(run(x, w), several(x, w))
        except BaseException as e:
            wrong.append(e)

    callers = [threading.Thread(target=caller, args=(k,)) for k in range(8)]
    for c in callers:
        c.start()
    for c in callers:
        c.join(60)
    assert not wrong
    assert 1 <= len(run.compiled.frames) <= 8


@needs_compiler
def test_after_a_call_that_failed_the_next_is_right(cache: Path) -> None:
    table, good = torch.randn(4, 3), torch.tensor([3, 0])
    run = terrazzo.compile(lambda t, i: t[i] * 2, table, good, options={"cache_dir": cache})
    for _ in range(3):
        with pytest.raises(UserError, match="out of range"):
            run(table, torch.tensor([0, 9]))
        torch.testing.assert_close(run(table, good), table[good] * 2)
    assert len(run.compiled.frames) == 1


# the cache


SECOND = """
import sys, torch, terrazzo
x = torch.arange(12.0).reshape(3, 4)
options = {"cache_dir": sys.argv[1], "compiler": sys.argv[2]}
run = terrazzo.compile(lambda x: (torch.softmax(x, -1), x.sum(0)), x, options=options)
print([r.tolist() for r in run(x)], bool(run.compiled.sources))
"""


@needs_compiler
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """The compiler is asked for its version, and called for nothing else: the second time it would fail."""
    stand_in, calls, broken = tmp_path / "compiler", tmp_path / "calls", tmp_path / "broken"
    body = f'[ "$1" = --version ] && exec c++ "$@"\necho called >> {calls}\n[ -e {broken} ] && exit 1\nexec c++ "$@"\n'
    stand_in.write_text("#!/bin/sh\n" + body)
    stand_in.chmod(0o755)

    def process() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", SECOND, str(tmp_path / "cache"), str(stand_in)]
        return subprocess.run(
            words,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=100,
        )

    first = process()
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith(" True\n")
    times = len(calls.read_text().split())
    assert times >= 2  # the probe and the kernels
    broken.touch()
    second = process()
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout.replace(" True\n", " False\n")
    assert len(calls.read_text().split()) == times
    shutil.rmtree(tmp_path / "cache")
    third = process()  # the stand-in does what it is here for
    assert third.returncode != 0 and "is not a C++ compiler" in third.stderr


def changed(part: str, which: int, **fields: Any) -> Callable[[Any], bytes]:
    """A plan in which some fields of a slot or a step are others."""

    def damage(plan: Any) -> bytes:
        items = [{**x, **fields} if k == which else x for k, x in enumerate(plan[part])]
        return json.dumps({**plan, part: items}).encode()

    return damage


def without(*keys: str) -> Callable[[Any], bytes]:
    def damage(plan: Any) -> bytes:
        return json.dumps({k: v for k, v in plan.items() if k not in keys}).encode()

    return damage


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [
        lambda plan: b"",
        lambda plan: json.dumps(plan).encode()[:-20],
        lambda plan: json.dumps({**plan, "version": 0}).encode(),
        without("slots"),
        lambda plan: json.dumps({**plan, "arena": 0}).encode(),
        lambda plan: json.dumps({**plan, "results": [99]}).encode(),
        lambda plan: json.dumps({**plan, "steps": [{**s, "key": "0" * 64} for s in plan["steps"]]}).encode(),
    ],
    ids=["empty", "truncated", "another version", "no slots", "no memory", "no such result", "a kernel that is gone"],
)
def test_a_plan_that_is_none_is_made_again(
    tmp_path: Path, damage: Callable[[Any], bytes], no_compiling: None, warm: Path
) -> None:
    """A file whose name and content agree, so the cache hands it out, but whose content is no use."""
    _made_again(tmp_path, damage, warm)


def _made_again(tmp_path: Path, damage: Callable[[Any], bytes], warm: Path) -> str:
    """What the log says of a damaged plan."""
    shutil.copytree(warm, tmp_path / "cache")
    (path,) = (tmp_path / "cache").rglob("*.plan")
    sound = path.read_bytes()
    path.unlink()
    given = damage(json.loads(sound))
    assert given != sound
    Cache(tmp_path / "cache", 1 << 30).put(path.name.split(".")[0], ".plan", given)
    run, x = chain(tmp_path / "cache"), torch.randn(5, 6)
    assert run.compiled.program is not None, "it was read"
    torch.testing.assert_close(run(x), (x + 1).cumsum(1).cumsum(0) * 2)
    assert path.read_bytes() == sound
    (event,) = [e for e in run.compiled.log.events if e.pass_name == "cache"]
    assert event.line().startswith("--- cache:plan skipped at ") and event.line().endswith("; it is made again")
    return event.reason


OTHER = {
    "a larger result": (changed("slots", 4, shape=[50, 60], strides=[60, 1]), "its results are others"),
    "a smaller result": (changed("slots", 4, shape=[1, 1]), "its results are others"),
    "a result of another type": (changed("slots", 4, dtype="f64"), "its results are others"),
    "a result with other strides": (changed("slots", 4, strides=[1, 1]), "uses other memory"),
    "a smaller input": (changed("slots", 0, shape=[1, 6]), "its inputs are others"),
    "an input called otherwise": (changed("slots", 0, name="y"), "its inputs are others"),
    "an input with other strides": (changed("slots", 0, strides=[1, 5]), "its inputs are others"),
    "a result in the arena": (changed("slots", 4, kind="arena"), "lies elsewhere"),
    "a temporary of its own": (changed("slots", 1, kind="result"), "lies elsewhere"),
    "a smaller temporary": (changed("slots", 1, shape=[1, 1]), "uses other memory"),
    "a temporary at another's place": (changed("slots", 2, offset=0), "share memory"),
    "a temporary that is not aligned": (changed("slots", 2, offset=4), "lies elsewhere"),
    "a kernel given less": (changed("steps", 1, args=[1]), "uses other memory"),
    "a function that is not there": (changed("steps", 1, name="k_x"), "cannot be loaded"),
    "a call of PyTorch": (
        changed("steps", 1, key="", name="aten.from_file.default", args=["owned", True, 2], results=[2]),
        "it calls aten.from_file.default",
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", OTHER)
def test_a_plan_of_another_program_is_made_again(tmp_path: Path, name: str, no_compiling: None, warm: Path) -> None:
    """It would have written beyond a tensor, or computed something else."""
    damage, why = OTHER[name]
    assert re.search(why, _made_again(tmp_path, damage, warm))


def chain(cache: Path) -> Any:
    """Three kernels and two temporaries."""
    return terrazzo.compile(
        lambda x: (x + 1).cumsum(1).cumsum(0) * 2, torch.zeros(5, 6), options={"cache_dir": cache, "fuse": False}
    )


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds `chain`."""
    directory = tmp_path_factory.mktemp("warm")
    assert chain(directory).compiled.plan.arena
    return directory


@needs_compiler
def test_a_sound_plan_is_read(no_compiling: None, warm: Path) -> None:
    run, x = chain(warm), torch.randn(5, 6)
    assert run.compiled.program is None and not run.compiled.sources
    torch.testing.assert_close(run(x), (x + 1).cumsum(1).cumsum(0) * 2)


@needs_compiler
def test_a_plan_is_found_again_only_for_the_same_choices(tmp_path: Path, warm: Path) -> None:
    """Other shapes, other code and other options are other plans."""
    shutil.copytree(warm, tmp_path / "cache")

    def f(x: Any) -> Any:
        return (x + 1).cumsum(1).cumsum(0) * 2

    def g(x: Any) -> Any:
        return (x + 1).cumsum(1).cumsum(0) * 3

    plain = {"cache_dir": tmp_path / "cache", "fuse": False}
    cases = [(f, (5, 6), {**plain, "fuse": True}), (f, (6, 5), plain), (g, (5, 6), plain)]
    for fn, shape, options in cases:
        run, x = terrazzo.compile(fn, torch.zeros(shape), options=options), torch.randn(shape)
        assert run.compiled.program is not None
        torch.testing.assert_close(run(x), fn(x))


# no compiler


def test_without_a_compiler_the_interpreter_runs_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "_candidates", lambda: iter(()))
    monkeypatch.setattr(compiled_module, "_said", set())
    x = torch.randn(3, 5)
    with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler was found, so the interpreter runs instead") as caught:
        run = terrazzo.compile(torch.softmax, x, -1, options={"cache_dir": tmp_path})
    assert len(caught) == 1 and isinstance(run.compiled, Interpreted)
    torch.testing.assert_close(run(x, -1), torch.softmax(x, -1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        terrazzo.compile(torch.relu, x, options={"cache_dir": tmp_path})


# weights


@pytest.mark.parametrize("target", TARGETS)
def test_weights_that_are_changed_in_place_are_seen(cache: Path, target: str) -> None:
    """And weights that are replaced are not: what was compiled is bound to the tensors it saw."""
    module, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    run = terrazzo.compile(module, x, options={"cache_dir": cache, "target": target})
    with torch.no_grad():
        torch.testing.assert_close(run(x), module(x))
        module.weight.mul_(3)
        module.bias.fill_(1)
        torch.testing.assert_close(run(x), module(x))
        module.load_state_dict(torch.nn.Linear(4, 3).state_dict())  # copies into the same tensors
        expected = module(x)
        torch.testing.assert_close(run(x), expected)
        module.weight = torch.nn.Parameter(torch.zeros(3, 4))
        torch.testing.assert_close(run(x), expected)


@pytest.mark.parametrize("target", TARGETS)
def test_two_modules_of_one_class_share_kernels_and_no_weights(cache: Path, target: str) -> None:
    x = torch.randn(2, 4)
    modules = [torch.nn.Linear(4, 3) for _ in range(2)]
    runs = [terrazzo.compile(m, x, options={"cache_dir": cache, "target": target}) for m in modules]
    for m, run in zip(modules, runs, strict=True):
        torch.testing.assert_close(run(x), m(x).detach())


# inputs and results


@pytest.mark.parametrize("target", TARGETS)
def test_results_are_tensors_of_their_own(cache: Path, target: str) -> None:
    x = torch.ones(3)
    run = terrazzo.compile(lambda x: (x + 1, x + 1, x.clone(), x), x, options={"cache_dir": cache, "target": target})
    *results, same = run(x)
    kept = [r.clone() for r in results]
    assert same is x and len({r.data_ptr() for r in (x, *results)}) == 4
    x.zero_()
    run(x)
    for r, before in zip(results, kept, strict=True):
        torch.testing.assert_close(r, before)


@pytest.mark.parametrize("target", TARGETS)
def test_every_layout_it_was_compiled_for(cache: Path, target: str) -> None:
    """The strides of the example are those of the calls, and of an element's place in memory."""
    for example in (
        torch.randn(4, 6).T,
        torch.randn(12, 4)[::2],
        torch.randn(3, 4)[:, 1:3],
        torch.randn(4).expand(3, 4),
        torch.randn(0, 4),
    ):
        run = terrazzo.compile(lambda x: x * 2 + 1, example, options={"cache_dir": cache, "target": target})
        torch.testing.assert_close(run(example), example * 2 + 1)
        if not example.is_contiguous():
            with pytest.raises(UserError, match="compiled for strides"):
                run(example.contiguous())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.eye(3).to_sparse(),
            r"input \w+: compiled for a dense tensor, got one of layout torch\.sparse_coo",
        ),
        (
            lambda: torch.eye(3).to_sparse_csr(),
            r"input \w+: compiled for a dense tensor, got one of layout torch\.sparse_csr",
        ),
        (lambda: fake(3, 3), r"input \w+: a FakeTensor without memory"),
    ],
    ids=["coo", "csr", "fake"],
)
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:Accessing the data pointer of FakeTensor")
def test_tensors_that_do_not_lie_in_memory_are_refused(
    cache: Path, target: str, make: Callable[[], Any], message: str
) -> None:
    run = terrazzo.compile(torch.relu, torch.eye(3), options={"cache_dir": cache, "target": target})
    with pytest.raises(UserError, match=message):
        run(make())


def fake(*shape: int) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(shape)


@pytest.mark.parametrize("target", TARGETS)
def test_a_tensor_that_is_negated_when_it_is_read(cache: Path, target: str) -> None:
    """The imaginary part of a conjugate is the memory of the number with a mark that says minus."""
    x = torch.tensor([1 + 5j, 2 - 3j]).conj().imag
    assert x.is_neg()
    run = terrazzo.compile(lambda x: x * 2 + 1, x, options={"cache_dir": cache, "target": target})
    assert run(x).tolist() == [-9.0, 7.0]


GAPS = """
@loop
def f(x: f32[2000]):
    with kernel("a", t=f32[2000] @ (64,)):
        for a0 in free(2000):
            t[a0] = add(x[a0], f32(1.0))
    with kernel("b", u=f32[2000]):
        for a0 in free(2000):
            u[a0] = add(t[a0], f32(1.0))
    with kernel("c", v=f32[2000]):
        for a0 in free(2000):
            v[a0] = add(t[a0], u[a0])
    return (v,)
"""


@needs_compiler
def test_a_temporary_with_gaps_has_the_memory_it_spans(cache: Path) -> None:
    run, x = compile_program(parse(GAPS), {}, Options(cache_dir=cache, fuse=False)), torch.randn(2000)
    assert run.plan.arena >= 2000 * 64 * 4
    torch.testing.assert_close(run([x])[0], 2 * x + 3)
