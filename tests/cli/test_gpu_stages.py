"""The stages of a GPU on the command line: printed, dumped, read back, pinned. No GPU is needed for any of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Terrazzo
from tests.cli.examples import SOFTMAX

from terrazzo.front.capture import capture
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import dialect, lowering
from terrazzo.run.cache import Cache
from terrazzo.run.cuda import build

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
        ("with schedule(", "mine.txt, line 1, column 14: "),
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
    assert told == (
        "error: the target sm_90a needs a GPU to run, and PyTorch sees none; "
        "`terrazzo compile --target sm_90a` needs none\n"
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


LINEAR = "x, w = torch.zeros(256, 128, dtype={0}), torch.zeros(192, 128, dtype={0})\nx @ w.t()"


def test_a_plan_stands_below_its_schedule(terrazzo: Terrazzo) -> None:
    out = terrazzo("compile", "-c", SOFTMAX, "--ir", "tile", *GPU).stdout
    kernel, schedule, plan = (out.index(x) for x in ("for a0", "with schedule(", "with plan("))
    assert kernel < schedule < plan and out[plan:].splitlines()[1].startswith("    order(tiles=(a0(8),), blocks=8)")


def test_a_pinned_plan(terrazzo: Terrazzo, tmp_path: Path) -> None:
    """What `--ir tile` printed below the loops is a file of a schedule with its plan."""
    code = LINEAR.format("torch.bfloat16")
    chosen = terrazzo("compile", "-c", code, "--ir", "tile", "--target", "sm_80").stdout
    text = chosen[chosen.index("with schedule") :]
    found = re.search(r"slots=(\d), ahead=(\d)", text)
    assert found and int(found[2]) == int(found[1]) - 1 > 1
    (tmp_path / "mine.txt").write_text(text.replace(found[0], f"slots={found[1]}, ahead=1"))
    words = ("compile", "-c", code, "--target", "sm_80", "--schedule", str(tmp_path / "mine.txt"))
    told = terrazzo(*words, "--ir", "tile", "-v").stdout
    assert f"slots={found[1]}, ahead=1" in told and ">>> plan:pin at mm: by the user" in told
    (tmp_path / "mine.txt").write_text(text.replace(found[0], f"slots={found[1]}, ahead={found[1]}"))
    why = rf"{found[1]} steps ahead, and of {found[1]} slots \d can be filled early\n        ring0 = "
    assert re.search(rf"mine.txt, line \d+, column 5: the plan of mm: {why}", terrazzo(*words, code=2).stderr)


def test_every_step_of_a_plan_is_a_diff(terrazzo: Terrazzo) -> None:
    """Each rule adds the lines it decides and takes away the words of the schedule it read, and touches no other."""
    out = terrazzo("compile", "-c", LINEAR.format("torch.bfloat16"), "--ir", "tile", *GPU, "-vv").stdout
    steps = re.findall(r">>> plan:(\w+) at mm\n(.*?)<<< plan:\1\n", out, re.DOTALL)
    names = [name for name, _ in steps]
    assert names[:5] == ["walk_tiles", "assign_warps", "place_products", "pipeline", "lay_out_operands"]
    added = {name: [x[5:] for x in diff.splitlines() if x.startswith("+    ")] for name, diff in steps}
    gone = [x for _, diff in steps for x in diff.splitlines() if x.startswith("-")]
    assert [x.split("(")[0] for x in added["walk_tiles"]] == ["order"]
    assert all(" = stream(" in x for x in added["lay_out_operands"]) and len(added["lay_out_operands"]) == 2
    assert gone and all("not read yet" in x or "product(" in x for x in gone)
    plan = out[out.rindex("with plan(") :].splitlines()[1:]
    assert all(line.strip() in {y for x in added.values() for y in x} for line in plan)
    assert out.count(">>> plan:") == len(steps) == len(set(names))
    quiet = terrazzo("compile", "-c", LINEAR.format("torch.bfloat16"), "--ir", "tile", *GPU, "-v").stdout
    assert ">>> plan:pipeline at mm\n" in quiet and "<<<" not in quiet


@pytest.mark.parametrize(
    ("code", "target", "answers"),
    [
        (LINEAR.format("torch.float32"), "sm_90a",
         ["not tensor_cores: no instruction of sm_90a adds up products of f32 in f32"]),
        ("x, w = torch.zeros(256, 128), torch.zeros(192, 128)\nx.bfloat16() @ w.bfloat16().t()", "sm_80",
         ["not tensor_cores: x is computed on its way, and instructions take what lies in memory"]),
        ("x, w = torch.zeros(64, 36).half(), torch.zeros(36, 64).half()\ntorch.cat([x, x], 1)[:, 3:39] @ w", "sm_80",
         ["not tensor_cores: "]),
        (LINEAR.format("torch.bfloat16"), "sm_75",
         ["not tensor_cores: no instruction of sm_75 adds up products of bf16 in f32"]),
        (LINEAR.format("torch.bfloat16"), "sm_80",
         ["not wgmma: it needs sm_90a, and the target is sm_80",
          "swizzle: x_s: ldmatrix reads 8 pieces of 16 bytes from rows of 128 bytes: 1 wavefront swizzled by 128, "
          "8 wavefronts if not"]),
        ("x, w = torch.zeros(4096, 256, dtype=torch.bfloat16), torch.zeros(4096, 256, dtype=torch.bfloat16)\nx @ w.t()",
         "sm_90a",
         ["swizzle: x_s: wgmma, which takes swizzled rows only, reads 8 pieces of 16 bytes from rows of 128 bytes: "
          "1 wavefront"]),
        ("x, w = torch.zeros(1, 128), torch.zeros(192, 128)\nx @ w.t()", "sm_90a",
         ["not tensor_cores: one of its factors is a vector"]),
    ],
)  # fmt: skip
def test_why_no_tensor_cores(terrazzo: Terrazzo, code: str, target: str, answers: list[str]) -> None:
    """Why none, why not those of warpgroups, why this swizzle; what runs on the best has nothing to explain."""
    out = terrazzo("explain", "-c", code, "--target", target).stdout
    for answer in answers:
        assert answer in out
    assert ("wgmma.m64" in out) <= ("not " not in out.split("because")[1])
    assert "    plan      order(tiles=" in out


def test_why_sums_stay_where_they_are(terrazzo: Terrazzo) -> None:
    """Weights of attention are the second product's first factor as they lie."""
    code = "q = torch.zeros(2, 4, 1024, 64, dtype=torch.bfloat16)\ntorch.softmax(q @ q.mT, -1) @ q"
    out = terrazzo("explain", "-c", code, *GPU).stdout
    assert "layout: acc3: its sums lie as acc4.a wants them, and are rounded where they are" in out
    assert 'convert(value="acc3", to="acc4.a", by="registers", layout="reg: k1 m8 k8; lane: k2 k4 m1 m2 m4' in out


def test_what_multiplies_nothing_is_not_asked_for_tensor_cores(terrazzo: Terrazzo) -> None:
    assert "tensor_cores" not in terrazzo("explain", "-c", SOFTMAX, *GPU).stdout


def test_what_was_tried_and_why_it_lost(terrazzo: Terrazzo) -> None:
    """It is known once the kernels were compiled, for which NVRTC must be here."""
    pytest.importorskip("cuda.bindings")
    code = "torch.nn.functional.layer_norm(torch.ones(1024, 53248), (53248,))"
    words = ("explain", "-c", code, *GPU)
    assert "it lost" not in terrazzo(*words).stdout
    options = Options(target="sm_90a")
    cache = Cache(options.cache_dir, options.cache_limit)
    args = (torch.empty(1024, 53248),)
    program = capture(lambda x: torch.nn.functional.layer_norm(x, (53248,)), args, {}).program
    build(lowering(program, options), options, cache, "sm_90a")
    told = " ".join(terrazzo(*words).stdout.split())
    assert re.search(r"share: .*; it lost: it spills \d+ bytes of registers to memory \(64 registers\)", told)
    shown = terrazzo("compile", "-c", code, *GPU, "--ir", "tile", "-v").stdout
    assert re.search(r"--- schedule:share skipped at native_layer_norm: .*it\s+lost", shown)
    assert "it lost" not in terrazzo(*words, "--spills").stdout
