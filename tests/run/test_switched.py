"""PyTorch's switch for products in float32: obeyed when a program is compiled, and at every call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.run.test_calls import functions_called

from terrazzo.front.capture import capture
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.run import compiled
from terrazzo.run.switched import Switched, asked, convolutions_in_tf32


@pytest.fixture(autouse=True)
def switch() -> Iterator[None]:
    """The switch as it was."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_the_switch_is_read() -> None:
    found = []
    for setting in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(setting)
        found.append(asked())
    torch.backends.cuda.matmul.allow_tf32 = False
    assert [*found, asked()] == ["split", "tf32", "bf16", "split"]
    torch.backends.cuda.matmul.allow_tf32 = True
    assert asked() == "tf32"


@pytest.mark.parametrize(("setting", "way"), [("tf32", "tf32"), ("ieee", "split")])
def test_the_newer_switch_is_read(setting: str, way: str) -> None:
    """In a process of its own: whoever used both switches may not ask the older one any more."""
    code = f"""import torch
from terrazzo.run.switched import asked
torch.backends.cuda.matmul.fp32_precision = {setting!r}
print(asked())"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == way


@pytest.mark.parametrize("allowed", [False, True])
def test_whether_cudnn_may_use_tf32_is_read(allowed: bool) -> None:
    """It is what a library is priced by, and names a plan."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
        assert convolutions_in_tf32() == allowed
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=allowed):
        assert not convolutions_in_tf32()
    program = capture(lambda x: x + 1, (torch.zeros(4),)).program
    keys = {compiled.plan_key(program, Options(target="sm_90a", tf32=x), "a machine") for x in (False, True)}
    assert len(keys) == 2


@pytest.mark.parametrize(("setting", "allowed"), [("tf32", "True"), ("ieee", "False")])
def test_the_newer_switch_of_cudnn_is_read(setting: str, allowed: str) -> None:
    code = f"""import torch
from terrazzo.run.switched import convolutions_in_tf32
torch.backends.cudnn.conv.fp32_precision = {setting!r}
print(convolutions_in_tf32())"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == allowed


def test_a_program_is_compiled_anew_when_the_switch_of_convolutions_is_turned() -> None:
    made: list[bool] = []

    def make(way: str) -> Any:
        made.append(convolutions_in_tf32())
        return SimpleNamespace(tf32=made[-1])

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        program = Switched(make)
        assert program.tf32 and made == [True]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert not program.tf32 and not program.tf32 and made == [True, False]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        assert program.tf32 and made == [True, False]


def test_a_program_is_compiled_anew_when_the_switch_is_turned() -> None:
    made = []

    def make(way: str) -> Any:
        made.append(way)
        again = lambda bound: lambda inputs: [way, bound, *inputs]  # noqa: E731
        return SimpleNamespace(way=way, rebound=again)

    torch.set_float32_matmul_precision("highest")
    program = Switched(make)
    assert made == ["split"] and program.way == "split"
    torch.set_float32_matmul_precision("medium")
    assert program.way == "bf16" and made == ["split", "bf16"]
    other = program.rebound({"w": 1})
    assert other([2]) == ["bf16", {"w": 1}, 2]
    torch.set_float32_matmul_precision("highest")
    assert other([2]) == ["split", {"w": 1}, 2] and program.way == "split"
    assert made == ["split", "bf16"]
    with pytest.raises(AttributeError):
        _ = program.nothing


def test_a_call_asks_for_switches_by_few_functions() -> None:
    """It is done at every call of every program: by PyTorch's own properties it took longer than to launch a kernel."""
    program = Switched(lambda way: SimpleNamespace(consume=lambda inputs: inputs))
    found = functions_called(lambda: program.consume([1]))
    assert len(found) <= 7, found


def test_who_compiles_for_a_gpu_obeys_the_switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def build(key: str, cache: Any, machine: Any, program: Any, bound: Any, options: Options) -> Any:
        seen.append(options.fp32)
        return options.fp32

    monkeypatch.setattr(compiled, "_build", build)
    monkeypatch.setattr(compiled, "Cuda", lambda *_: SimpleNamespace(key=lambda cache: "gpu"))
    program = capture(torch.matmul, (torch.zeros(4, 4), torch.zeros(4, 4)), {}).program
    options = Options(target="sm_90a", cache_dir=tmp_path)
    torch.set_float32_matmul_precision("high")
    found = compiled.compile_program(program, {}, options)
    assert seen == ["tf32"] and found.now() == "tf32"
    torch.set_float32_matmul_precision("medium")
    assert found.now() == "bf16"
    assert compiled.compile_program(program, {}, replace(options, fp32="split")) == "split"


def test_what_is_kept_is_found_for_the_same_precision_only() -> None:
    program = capture(torch.matmul, (torch.zeros(4, 4), torch.zeros(4, 4)), {}).program
    ways = ("exact", "split", "tf32", "bf16")
    keys = {compiled.plan_key(program, Options(target="sm_90a", fp32=way), "gpu") for way in ways}
    assert len(keys) == len(ways)


@pytest.mark.parametrize(
    ("way", "products", "kind"),
    [
        ("auto", 3, "float16"),
        ("exact", 0, ""),
        ("split", 3, "float16"),
        ("tf32", 1, "float16"),
        ("bf16", 1, "bfloat16"),
    ],
)
def test_ways_to_multiply(way: str, products: int, kind: str) -> None:
    square = torch.zeros(1024, 1024)
    program = capture(lambda x, w: x @ w.t(), (square, square.clone()), {}).program
    done = lowering(program, Options(target="sm_90a", fp32=way, libraries="never"))
    told = [e.reason for e in done.log.events if e.pass_name == "parts" and e.subject == "mm"]
    assert told == ([f"a product of float32 is {products} of {kind}"] if products else [])
    assert ("bf16" in str(done.loop.steps)) == (kind == "bfloat16")


def test_what_goes_wrong_while_compiling_is_told() -> None:
    def make(way: str) -> Any:
        raise AttributeError("of the compiler")

    with pytest.raises(AttributeError, match="of the compiler"):
        Switched(make)
