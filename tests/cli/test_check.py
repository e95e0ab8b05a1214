"""`terrazzo check` and `terrazzo bisect`: what they say of right and of wrong compilations, and the file they leave."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.check.plants import PLANTS
from tests.cli.conftest import Terrazzo
from tests.cli.examples import SOFTMAX

from terrazzo import pipelines
from terrazzo.errors import CompilerBug
from terrazzo.rules.loop.fusion import fuse

INLINED = "x = torch.randn(8, 8)\ntorch.exp(x.sin() * 2) + x"


@pytest.mark.parametrize("target", ["interpreter", "sm_80"])
def test_a_right_compilation(terrazzo: Terrazzo, target: str) -> None:
    out = terrazzo("check", "-c", SOFTMAX, "--target", target).stdout.splitlines()
    assert [line.split()[0] for line in out[:3]] == ["torch_to_tensor", "tensor_to_loop", "gradients"]
    assert out[-1] == "ok: no rule application moves a result beyond rounding"
    assert any(line.startswith("simulated ") for line in out) == (target == "sm_80")
    assert terrazzo("bisect", "-c", SOFTMAX, "--target", target).stdout == "ok: every kernel computes what it should\n"


def test_every_stage_can_be_checked_from_its_text(terrazzo: Terrazzo, tmp_path: Path) -> None:
    terrazzo("compile", "-c", SOFTMAX, "--target", "sm_80", "--dump", str(tmp_path))
    files = {"torch": "00-torch", "tensor": "01-tensor", "loop": "02-loop", "tile": "04-tile", "kernel": "05-kernel"}
    for ir, name in files.items():
        assert "ok: " in terrazzo("check", "--from", ir, str(tmp_path / f"{name}.txt"), "--target", "sm_80").stdout


def test_a_kernel_that_is_never_right(terrazzo: Terrazzo, tmp_path: Path) -> None:
    terrazzo("compile", "-c", "torch.randn(4, 2000).sum(-1)", "--target", "sm_80", "--dump", str(tmp_path))
    file = tmp_path / "broken.txt"
    file.write_text(re.sub(r"\n *sync\(\)", "", (tmp_path / "05-kernel.txt").read_text()))
    out = terrazzo("check", "--from", "kernel", str(file), "--target", "sm_80", code=1).stdout
    start = f"wrong: kernel:simulation at forward\n    forward cannot run: {file}, line "
    assert out.startswith(start) and "no barrier between" in out
    place = re.match(
        r"(\d+), column (\d+): sum_1: Load reads .* line \d+ of the kernel, `(.*)`, block", out[len(start) :]
    )
    assert place and file.read_text().splitlines()[int(place[1]) - 1][int(place[2]) - 1 :] == place[3]


def test_a_wrong_rule_is_named_with_a_program_that_shows_it(
    terrazzo: Terrazzo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTS["inlined with axes swapped"].plant(monkeypatch)
    out = terrazzo("check", "-c", INLINED, "--target", "interpreter", "--dump", str(tmp_path), "-v", code=1).stdout
    assert "wrong: fuse:inline at exp into add\n    add (f32[8, 8]) is off by up to " in out
    assert out.index("before:\nwith kernel('exp'") < out.index("after:\nwith kernel('add'")
    found = re.search(r"terrazzo (check --from loop (\S+) --target interpreter)\n$", out)
    assert found and Path(found[2]).parent == tmp_path and len(Path(found[2]).read_text().splitlines()) < 20
    assert "wrong: fuse:inline at exp into add" in terrazzo(*found[1].split(), "--no-shrink", code=1).stdout
    monkeypatch.undo()
    assert "ok: " in terrazzo(*found[1].split()).stdout, "the file shows the bug only while it is there"


def test_bisect_names_kernel_and_rule(terrazzo: Terrazzo, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS["inlined with axes swapped"].plant(monkeypatch)
    out = terrazzo("bisect", "-c", INLINED, "--target", "interpreter", code=1).stdout
    assert out.startswith("kernel 0, add: is off by up to ") and "wrong: fuse:inline at exp into add" in out


def test_json(terrazzo: Terrazzo, monkeypatch: pytest.MonkeyPatch) -> None:
    right = json.loads(terrazzo("check", "-c", SOFTMAX, "--target", "sm_80", "--json").stdout)
    assert right["wrong"] is None and [p["name"] for p in right["passes"]] == list(pipelines.LOWER)
    assert right["kernels"][0]["blocks"] == right["kernels"][0]["grid"]
    assert json.loads(terrazzo("bisect", "-c", SOFTMAX, "--target", "sm_80", "--json").stdout) == {"wrong": None}
    PLANTS["inlined with axes swapped"].plant(monkeypatch)
    wrong = json.loads(terrazzo("check", "-c", INLINED, "--target", "interpreter", "--json", code=1).stdout)["wrong"]
    assert (wrong["pass"], wrong["rule"], wrong["subject"]) == ("fuse", "inline", "exp into add") and Path(
        wrong["file"]
    ).exists()
    found = json.loads(
        terrazzo("bisect", "-c", INLINED, "--target", "interpreter", "--json", "--no-shrink", code=1).stdout
    )["wrong"]
    assert (found["number"], found["kernel"], found["rule"], found["file"]) == (0, "add", "inline", None)


@pytest.mark.parametrize("error", [CompilerBug("the rule is lost"), IndexError("tuple index out of range")])
def test_a_compiler_bug_prints_the_command_that_shows_it(
    terrazzo: Terrazzo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(fuse._Fusion, "merges", fails)
    told = terrazzo("compile", "-c", SOFTMAX, "--target", "sm_80", "--dump", str(tmp_path), code=70).stderr
    assert str(error) in told and "Please report this with the output of:\n" in told
    found = re.search(r"To see it again:\n    terrazzo (check --from loop \S+ --target sm_80)\n", told)
    assert found and found[1].split()[3].startswith(str(tmp_path))
    again = terrazzo(*found[1].split(), "--no-shrink", code=1).stdout
    assert "wrong: fuse:fuse at forward" in again and str(error) in again
    monkeypatch.undo()
    assert "ok: " in terrazzo(*found[1].split()).stdout
