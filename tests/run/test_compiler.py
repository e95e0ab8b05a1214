"""A compiler is found, used in parallel, and never blamed for what the machine did."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terrazzo.errors import CompilerBug, Limitation, UserError
from terrazzo.options import Options
from terrazzo.run import compiler as compiler_module
from terrazzo.run.cache import Cache
from terrazzo.run.compiler import Compiler, compile_all, find_compiler, processor

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 1 << 30)


def returning(number: int) -> str:
    return f'extern "C" int answer() {{ return {number}; }}\n'


def script(path: Path, body: str) -> str:
    """An executable file that stands in for a compiler."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_sources_become_shared_objects_in_order(cache: Cache) -> None:
    paths = compile_all([returning(1), returning(2), returning(1)], Options(), cache)
    assert [ctypes.CDLL(str(path)).answer() for path in paths] == [1, 2, 1]
    assert paths[0] == paths[2]


@needs_compiler
def test_a_warm_cache_compiles_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = compile_all([returning(3)], Options(), cache)

    def forbidden(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler_module._Builds, "build", forbidden)
    assert compile_all([returning(3)], Options(), cache) == cold


@needs_compiler
def test_a_damaged_shared_object_is_rebuilt(cache: Cache) -> None:
    (path,) = compile_all([returning(4)], Options(), cache)
    path.write_bytes(path.read_bytes()[:100])
    (again,) = compile_all([returning(4)], Options(), cache)
    assert ctypes.CDLL(str(again)).answer() == 4


@needs_compiler
def test_an_answer_to_the_probe_that_makes_no_sense_is_asked_again(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = find_compiler(None, cache)
    monkeypatch.setattr(Path, "read_text", lambda path: "999")
    assert find_compiler(None, cache) == before


@needs_compiler
def test_kernels_use_several_threads_and_the_vector_library(cache: Cache) -> None:
    if "Free Software Foundation" not in subprocess.run(["c++", "--version"], capture_output=True, text=True).stdout:
        pytest.skip("only gcc is known to bring OpenMP along")
    found = find_compiler("c++", cache)
    assert found is not None
    assert found.parallel


@needs_compiler
def test_a_source_that_does_not_compile_is_our_bug_and_can_be_reproduced(cache: Cache) -> None:
    with pytest.raises(CompilerBug) as caught:
        compile_all([returning(5), "int broken() { return undeclared; }\n"], Options(), cache)
    title, error, *_, command = str(caught.value).splitlines()
    assert title == "generated C++ does not compile:"
    assert "kernel.cpp:1:" in error
    assert "undeclared" in error
    again = subprocess.run(command, shell=True, cwd=cache.directory, capture_output=True, text=True)
    assert again.returncode != 0
    assert "undeclared" in again.stderr


def test_without_a_compiler_the_interpreter_is_named(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_candidates", lambda: iter(()))
    with pytest.raises(
        Limitation, match=r"no C\+\+ compiler was found .* the interpreter runs instead.*`apt install g\+\+`"
    ):
        compile_all([returning(6)], Options(), cache)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "there is no such command"),
        ("no-such-compiler", "there is no such command"),
        ("true", "it cannot build ten lines"),
        ("false", "it does not know `--version`"),
    ],
)
def test_a_compiler_that_is_none_is_the_users_error(cache: Cache, name: str, why: str) -> None:
    with pytest.raises(UserError, match=f"option compiler: '{name}' is not a C\\+\\+ compiler .*: {why}"):
        compile_all([returning(7)], Options(compiler=name), cache)


def test_a_compiler_that_cannot_be_read_as_a_command_is_the_users_error(cache: Cache) -> None:
    with pytest.raises(UserError, match='"g\\+\\+ \'-O2" cannot be read as a command: No closing quotation'):
        compile_all([returning(7)], Options(compiler="g++ '-O2"), cache)


HANGS = "sleep 100 & echo $! >> {}/children; wait"


def ended(directory: Path) -> bool:
    """Whether all children of a stopped compiler end; they were told to, which takes a while on a busy machine."""
    file = directory / "children"
    children = [int(child) for child in file.read_text().split()] if file.exists() else []  # it may have got nowhere
    deadline = time.monotonic() + 30
    while (running := any(map(is_running, children))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running


def test_a_compiler_that_never_says_what_it_is(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_SAYS", 0.5)
    mute = script(tmp_path / "mute", HANGS.format(tmp_path))
    with pytest.raises(UserError, match=r"option compiler: .*mute' is not .* does not answer `--version` within 0.5 s"):
        compile_all([returning(7)], Options(compiler=mute), cache)
    assert ended(tmp_path)


@needs_compiler
def test_a_compiler_that_hangs_on_the_probe_is_passed_over(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "_PROBES", 0.5)
    stuck = script(tmp_path / "stuck", f'[ "$1" = --version ] && echo stuck 1.0 && exit\n{HANGS.format(tmp_path)}')
    with pytest.raises(UserError, match=r"stuck' is not .*: ten lines took it more than 0.5 s"):
        find_compiler(stuck, cache)
    assert ended(tmp_path)
    monkeypatch.setattr(compiler_module, "_PROBES", 120.0)
    working = shutil.which("c++") or ""
    monkeypatch.setattr(compiler_module, "_candidates", lambda: iter([("false",), (working,)]))
    found = find_compiler(None, cache)
    assert found is not None and found.command == (working,)


@needs_compiler
def test_a_compiler_that_hangs_on_a_kernel_is_stopped(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = script(
        tmp_path / "slow",
        f'[ "$1" = --version ] || grep -q probe kernel.cpp && exec c++ "$@"\n{HANGS.format(tmp_path)}',
    )
    assert find_compiler(slow, cache) is not None
    monkeypatch.setattr(compiler_module, "_BUILDS", 0.5)
    with pytest.raises(UserError, match=r"slow was stopped: .* more than 0.5 s. Name another .*\n.*slow -std=c\+\+17"):
        compile_all([returning(10)], Options(compiler=slow), cache)
    assert ended(tmp_path)


@needs_compiler
def test_a_command_may_name_the_processor(cache: Cache) -> None:
    """It takes the place of the machine's own, which comes later on the line and would win."""
    if platform.machine() != "x86_64":
        pytest.skip(f"the levels of x86-64 are not known to {platform.machine()}")
    source = 'extern "C" int answer() {\n#ifdef __AVX__\nreturn 1;\n#endif\nreturn 0; }\n'
    plain, native = (find_compiler(f"c++{more}", cache) for more in (" -march=x86-64-v2", ""))
    assert plain is not None and native is not None
    assert "-march=native" in native.flags and "-march=native" not in plain.flags
    (path,) = compile_all([source], Options(compiler="c++ -march=x86-64-v2"), cache)
    assert ctypes.CDLL(str(path)).answer() == 0


@needs_compiler
def test_the_first_candidate_that_works_is_taken(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = script(tmp_path / "broken", '[ "$1" = --version ] && echo broken 1.0')
    working = shutil.which("c++") or ""
    monkeypatch.setattr(compiler_module, "_candidates", lambda: iter([(broken,), (working,)]))
    found = find_compiler(None, cache)
    assert found is not None
    assert found.command == (working,)


@needs_compiler
def test_a_compiler_without_openmp_falls_back_to_simd(cache: Cache, tmp_path: Path) -> None:
    picky = script(tmp_path / "picky", 'for a; do [ "$a" = -fopenmp ] && exit 1; done\nexec c++ "$@"')
    found = find_compiler(picky, cache)
    assert found is not None
    assert not found.parallel
    assert "-fopenmp-simd" in found.flags


@needs_compiler
def test_vectors_are_as_wide_as_the_processors(cache: Cache, tmp_path: Path) -> None:
    """On x86, whose compilers are told so; one that is not for x86 does not know the flag."""
    other = script(tmp_path / "other", 'case "$*" in *-mprefer*) exit 1; esac\nexec c++ "$@"')
    for name, flags in (
        ("c++", {"-mprefer-vector-width=512"} if platform.machine() == "x86_64" else set()),
        (other, set()),
    ):
        found = find_compiler(name, cache)
        assert found is not None and "-march=native" in found.flags and found.parallel
        assert {f for f in found.flags if "prefer" in f} == flags


@needs_compiler
def test_vector_functions_that_the_c_library_lacks_are_not_used(cache: Cache, tmp_path: Path) -> None:
    """A shared object of them links, since what it lacks may come from elsewhere, and cannot be loaded."""
    body = 'for a; do [ "$a" = -DTZ_VECTOR_MATH ] && sed -i s/erff/vector_erff/ kernel.cpp; done\nexec c++ "$@"'
    old = script(tmp_path / "old", body)
    found = find_compiler(old, cache)
    assert found is not None and found.parallel
    assert "-DTZ_VECTOR_MATH" not in found.flags


@needs_compiler
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("s/erff(x.i.)/(__builtin_trap(), 0)/", r"does not run on this processor \(Illegal instruction\)"),
        ("s/erff(x.i.)/x[i]/", "does not run here: it miscalculates"),
        ("s/erff(x.i.)/({ extern float none(float); none(x[i]); })/", "does not run here: .*undefined symbol"),
    ],
)
def test_a_compiler_for_another_machine_is_refused(cache: Cache, tmp_path: Path, change: str, why: str) -> None:
    body = f'[ "$1" = --version ] || sed -i "{change}" kernel.cpp\nexec c++ "$@"'
    other = script(tmp_path / "other", body)
    with pytest.raises(UserError, match=f"other' is not a C\\+\\+ compiler that can .*: what it builds {why}"):
        find_compiler(other, cache)


@needs_compiler
def test_a_full_disk_is_not_our_bug(cache: Cache, tmp_path: Path) -> None:
    full = script(
        tmp_path / "full",
        'grep -q probe kernel.cpp 2>/dev/null || [ "$1" = --version ] && exec c++ "$@"\n'
        'echo "kernel.cpp: error: No space left on device" >&2; exit 1',
    )
    with pytest.raises(UserError, match=r"ran out of disk space or memory: .*No space left"):
        compile_all([returning(8)], Options(compiler=full), cache)


def test_a_key_tells_everything_that_matters_apart() -> None:
    base = Compiler(("c++",), "c++ 1", ("-O3",), ("-lm",))
    others = [
        Compiler(("g++",), "c++ 1", ("-O3",), ("-lm",)),
        Compiler(("c++",), "c++ 2", ("-O3",), ("-lm",)),
        Compiler(("c++",), "c++ 1", ("-O2",), ("-lm",)),
        Compiler(("c++",), "c++ 1", ("-O3",), ()),
    ]
    assert len({compiler.key("source") for compiler in [base, *others]} | {base.key("other source")}) == 6


def test_the_processor_is_described() -> None:
    assert processor().splitlines()[0] == os.uname().machine
    assert processor() == processor()
    assert (os.confstr("CS_GNU_LIBC_VERSION") or "") in processor()


INTERRUPTED = """
import sys
from pathlib import Path
from terrazzo.options import Options
from terrazzo.run.cache import Cache
from terrazzo.run.compiler import compile_all

compile_all([f"// {n}" for n in range(8)], Options(compiler=sys.argv[1]), Cache(Path(sys.argv[2]), 1 << 30))
"""


@needs_compiler
def test_ctrl_c_ends_the_compilers_and_leaves_nothing(tmp_path: Path) -> None:
    # The stand-in builds the probe and then, asked for a kernel, says who it is and hangs in a child.
    slow = script(
        tmp_path / "slow",
        '[ "$1" = --version ] || grep -q probe kernel.cpp && exec c++ "$@"\n'
        f"sleep 100 & echo $! > {tmp_path}/child.$$; wait",
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, slow, str(tmp_path / "cache")],
        env={**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    children: list[int] = []
    deadline = time.monotonic() + 30
    while not children and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        children = [int(text) for path in tmp_path.glob("child.*") if (text := path.read_text().strip())]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert children
    assert not [child for child in children if is_running(child)]
    assert list(scratch.iterdir()) == []
    names = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert all(name.endswith(".txt") for name in names), names  # the probe's answer


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
