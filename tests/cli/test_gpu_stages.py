"""The stages of a GPU on the command line: printed, dumped, read back, pinned. No GPU is needed for any of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Terrazzo
from tests.cli.examples import SOFTMAX

from terrazzo.ir.text import parse, show
from terrazzo.pipelines import dialect

GPU = ("--target", "sm_90a")
TWO = "x = torch.randn(8, 128)\ntorch.softmax(x, -1), x.t() + 1"


def test_a_schedule_stands_below_its_loops(terrazzo: Terrazzo) -> None:
    out = terrazzo("compile", "-c", SOFTMAX, "--ir", "tile", *GPU).stdout.splitlines()
    assert re.fullmatch(r"=== 0: \w+ -> _softmax ===", out[0])
    assert out[1] == "for a0 in free(8):" and 'with schedule("_softmax", target="sm_90a"):' in out


def test_a_kernel_and_its_cuda(terrazzo: Terrazzo) -> None:
    kernel = terrazzo("compile", "-c", SOFTMAX, "--ir", "kernel", *GPU).stdout
    assert kernel.splitlines()[1].startswith("with launch('_softmax', _grid=8, _warps=") and "shuffle(" in kernel
    cuda = terrazzo("compile", "-c", SOFTMAX, "--ir", "cuda", *GPU).stdout
    assert cuda.count('extern "C" __global__') == 1 and "shuffle_xor(" in cuda
    assert terrazzo("compile", "-c", SOFTMAX, "--ir", "cuda", "--target", "sm_75").stdout == cuda


@pytest.mark.parametrize("ir", ["tile", "kernel", "cuda"])
def test_a_processor_has_no_schedules(terrazzo: Terrazzo, ir: str) -> None:
    result = terrazzo("compile", "-c", SOFTMAX, "--ir", ir, "--target", "cpu", code=2)
    assert result.stdout == ""
    assert result.stderr.endswith(": only kernels for a GPU have schedules; name one, such as --target sm_90a\n")


def test_a_dump_goes_on_from_every_stage(terrazzo: Terrazzo, tmp_path: Path) -> None:
    expected = terrazzo("compile", "-c", TWO, "--ir", "cuda", *GPU, "--dump", str(tmp_path)).stdout
    stages = {"torch": "00-torch.txt", "tensor": "01-tensor.txt", "loop": "03-fused.txt", "tile": "04-tile.txt"}
    for ir, name in stages.items():
        text = (tmp_path / name).read_text()
        assert dialect(parse(text)) == ir and show(parse(text)) == text
        assert re.sub(
            "// .*\n", "", terrazzo("compile", "--from", ir, str(tmp_path / name), "--ir", "cuda", *GPU).stdout
        ) == re.sub("// .*\n", "", expected)
    kernel = terrazzo("opt", str(tmp_path / "04-tile.txt"), "-p", "derive", *GPU).stdout
    assert dialect(parse(kernel)) == "kernel"
    (tmp_path / "kernel.txt").write_text(kernel)
    assert terrazzo("opt", str(tmp_path / "kernel.txt")).stdout == kernel
    again = terrazzo("compile", "--from", "kernel", str(tmp_path / "kernel.txt"), "--ir", "cuda", *GPU).stdout
    assert again.count("__global__") == expected.count("__global__") == len(list((tmp_path / "kernels").glob("*.cu")))


def test_a_pinned_schedule(terrazzo: Terrazzo, tmp_path: Path) -> None:
    chosen = terrazzo("compile", "-c", SOFTMAX, "--ir", "tile", *GPU).stdout
    text = chosen[chosen.index("with schedule") : chosen.index("with plan")]
    warps = re.search(r"_warps=(\d+)", terrazzo("compile", "-c", SOFTMAX, "--ir", "kernel", *GPU).stdout)
    assert warps and warps[1] != "4"
    file = tmp_path / "mine.txt"
    shared = "warp(4) * lane(32)"
    file.write_text(re.sub(r"(r0|r1) = .*", lambda m: f"{m[1]} = {shared}" if "like" not in m[0] else m[0], text))
    pinned = terrazzo("compile", "-c", SOFTMAX, "--ir", "kernel", *GPU, "--schedule", str(file)).stdout
    assert "_warps=4" in pinned
    told = terrazzo("compile", "-c", SOFTMAX, "--ir", "tile", *GPU, "--schedule", str(file), "-v").stdout
    assert shared in told and "schedule:pin at _softmax: by the user" in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "mine.txt cannot be read: "),
        ("with schedule(", "mine.txt: not readable as a schedule: "),
        ("x = 1", "mine.txt, line 1, column 1: expected `with schedule"),
        (
            'with schedule("frob", target="sm_90a"):\n    a0 = grid(8)\n',
            "there is no kernel frob to pin a schedule to; there are _softmax\n",
        ),
        (
            'with schedule("_softmax", target="sm_90a"):\n    a0 = grid(7)\n',
            "the schedule of _softmax does not fit it: a0 = grid(7): grid must",
        ),
    ],
)
def test_a_schedule_that_cannot_be(terrazzo: Terrazzo, tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "mine.txt").write_text(text)
    result = terrazzo("compile", "-c", SOFTMAX, *GPU, "--schedule", str(tmp_path / "mine.txt"), code=2)
    assert result.stdout == "" and message in result.stderr


def test_a_summary_has_the_passes_and_the_text(terrazzo: Terrazzo) -> None:
    told = json.loads(terrazzo("compile", "-c", SOFTMAX, "--ir", "kernel", "--json", *GPU).stdout)
    assert [p["name"] for p in told["passes"]][-3:] == ["schedule", "plan", "derive"]
    assert told["kernels"] == [{"name": "_softmax", "reads": told["kernels"][0]["reads"], "writes": ["_softmax"]}]
    assert told["text"][0]["text"].startswith("with launch('_softmax'")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_running_needs_a_gpu(terrazzo: Terrazzo) -> None:
    told = terrazzo("run", "-c", SOFTMAX, *GPU, code=2).stderr
    assert (
        told
        == "error: the target sm_90a needs a GPU to run, and PyTorch sees none; `terrazzo compile --target sm_90a` needs none\n"
    )


def test_what_accesses_cost(terrazzo: Terrazzo) -> None:
    out = terrazzo("explain", "-c", SOFTMAX, *GPU).stdout
    assert re.search(r"accesses +\d+\.\d [kM]B in [0-9.]+( thousand| million)? sectors", out)


def test_a_text_that_cannot_be_right_is_named_by_its_line(terrazzo: Terrazzo, tmp_path: Path) -> None:
    terrazzo("compile", "-c", SOFTMAX, "--check", *GPU, "--dump", str(tmp_path))
    text = terrazzo("opt", str(tmp_path / "04-tile.txt"), "-p", "derive", *GPU).stdout
    (tmp_path / "wrong.txt").write_text(text.replace("[block", "[block + 1", 1))
    told = terrazzo("compile", "--from", "kernel", str(tmp_path / "wrong.txt"), "--ir", "cuda", *GPU, code=2).stderr
    assert re.search(
        r"_softmax: `.*` at \[block \+ 1\] is outside \[0, \d+\) in dimension 0 of \w+, at block \d+", told
    )
