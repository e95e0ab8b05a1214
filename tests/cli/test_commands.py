"""Each command does what its help says."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Terrazzo
from tests.cli.examples import GELU, RMS_NORM, SOFTMAX

from terrazzo.hw.gpu import GPUS
from terrazzo.ir.text import parse, show
from terrazzo.pipelines import dialect


def test_loop_ir_is_printed_as_kernels(terrazzo: Terrazzo) -> None:
    out = terrazzo("compile", "-c", RMS_NORM, "--ir", "loop").stdout.splitlines()
    assert re.fullmatch(r"=== 0: x, weight -> \w+ ===", out[0])
    assert sum(line.startswith("===") for line in out) == 1
    assert out[1:3] == ["for a0 in free(32):", "    for r0 in reduce(2048):"]


@pytest.mark.parametrize("ir", ["torch", "tensor"])
def test_the_other_stages_read_back(terrazzo: Terrazzo, ir: str) -> None:
    text = terrazzo("compile", "-c", SOFTMAX, "--ir", ir).stdout
    assert dialect(parse(text)) == ir
    assert show(parse(text)) == text


def test_cpp_is_printed_without_what_all_kernels_share(terrazzo: Terrazzo) -> None:
    out = terrazzo("compile", "-c", SOFTMAX, "--ir", "cpp").stdout
    assert out.startswith("// === 0: x -> ")
    assert 'extern "C" int' in out and "#include" not in out


def test_v_has_a_line_for_each_rule(terrazzo: Terrazzo) -> None:
    out = terrazzo("compile", "-c", GELU, "--materialize", "tanh", "-v").stdout
    assert ">>> torch_to_tensor:tanh at tanh\n" in out
    assert re.search(r"^>>> fuse:inline at mul into \w+: [0-9.]+ us inlined, [0-9.]+ us apart$", out, re.MULTILINE)
    assert "--- fuse:inline skipped at tanh: pinned by materialize\n" in out
    assert "<<<" not in out


def test_vv_brackets_a_diff_for_awk(terrazzo: Terrazzo) -> None:
    out = terrazzo("compile", "-c", SOFTMAX, "-vv").stdout
    [block] = re.findall(r"^>>> torch_to_tensor:softmax.*?^<<< torch_to_tensor:softmax$", out, re.MULTILINE | re.DOTALL)
    assert re.search(r"^-\w+: f32\[8, 128\] = aten\._softmax", block, re.MULTILINE)
    assert re.search(r"^\+\w+: f32\[8\] = reduce\.max\(x, axes=\[1\]\)$", block, re.MULTILINE)
    fused = re.findall(r"^>>> fuse:inline.*?^<<< fuse:inline$", out, re.MULTILINE | re.DOTALL)
    assert fused and all(re.search(r"^-.*\n", block, re.MULTILINE) for block in fused)


def test_a_buffer_that_is_materialized_is_stored(terrazzo: Terrazzo) -> None:
    assert terrazzo("compile", "-c", GELU).stdout.count("===\n") == 1
    assert "tanh[a0, a1] = " in terrazzo("compile", "-c", GELU, "--materialize", "tanh").stdout
    assert terrazzo("compile", "-c", GELU, "--no-fuse").stdout.count("===\n") == 9


def test_json_of_compile(terrazzo: Terrazzo) -> None:
    found = json.loads(terrazzo("compile", "-c", SOFTMAX, "--json").stdout)
    assert len(found["kernels"]) == 1 and found["kernels"][0]["reads"] == ["x"]
    assert [p["name"] for p in found["passes"]][:2] == ["torch_to_tensor", "tensor_to_loop"]
    assert {"pass", "rule", "subject", "fired", "reason", "before", "after"} == found["events"][0].keys()
    assert found["fallbacks"] == []


def test_every_stage_of_a_dump_can_be_fed_back(terrazzo: Terrazzo, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    expected = terrazzo("compile", "-c", SOFTMAX, "--dump", str(dump)).stdout
    stages = {"torch": "00-torch.txt", "tensor": "01-tensor.txt", "loop": "02-loop.txt"}
    for ir, name in stages.items():
        assert terrazzo("compile", "--from", ir, str(dump / name)).stdout == expected
    assert terrazzo("compile", "--from", "loop", str(dump / "03-fused.txt")).stdout == expected
    assert len(list((dump / "kernels").glob("*.cpp"))) == 1
    assert all(json.loads(line)["pass"] for line in (dump / "events.jsonl").read_text().splitlines())
    assert json.loads((dump / "options.json").read_text())["target"] == "cpu"


def test_dumps_from_python(tmp_path: Path) -> None:
    import torch

    import terrazzo

    terrazzo.compile(torch.exp, torch.randn(4), options={"dump": tmp_path / "one", "cache_dir": tmp_path / "cache"})
    assert parse((tmp_path / "one" / "03-fused.txt").read_text()).steps
    several = torch.compile(
        torch.exp, backend="terrazzo", options={"dump": tmp_path / "all", "cache_dir": tmp_path / "cache"}
    )
    several(torch.randn(5))
    several(torch.randn(5, 6))
    sizes = [parse((d / "03-fused.txt").read_text()).inputs[0].type.shape for d in sorted((tmp_path / "all").iterdir())]
    assert sizes == [(5,), (5, 6)]


def test_a_dump_replaces_an_earlier_one(terrazzo: Terrazzo, tmp_path: Path) -> None:
    terrazzo("compile", "-c", GELU, "--no-fuse", "--dump", str(tmp_path))
    (tmp_path / "mine.txt").write_text("kept")
    terrazzo("compile", "--from", "loop", str(tmp_path / "03-fused.txt"), "--dump", str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {
        "03-fused.txt",
        "kernels",
        "events.jsonl",
        "options.json",
        "mine.txt",
    }
    assert len(list((tmp_path / "kernels").iterdir())) == 1


def test_opt_runs_the_passes_it_is_given(terrazzo: Terrazzo, tmp_path: Path) -> None:
    terrazzo("compile", "-c", SOFTMAX, "--dump", str(tmp_path))
    lifted = terrazzo("opt", str(tmp_path / "01-tensor.txt"), "-p", "tensor_to_loop").stdout
    assert lifted == (tmp_path / "02-loop.txt").read_text()
    fused = terrazzo("opt", str(tmp_path / "02-loop.txt"), "--passes", "fuse, store_as_read", "-v").stdout
    assert fused.startswith(">>> fuse:inline at ") and fused.endswith((tmp_path / "03-fused.txt").read_text())
    again = terrazzo("opt", str(tmp_path / "03-fused.txt"))
    assert again.stdout == (tmp_path / "03-fused.txt").read_text()


def test_explain_gives_a_reason_for_each_boundary(terrazzo: Terrazzo) -> None:
    out = terrazzo("explain", "-c", GELU, "--materialize", "tanh").stdout
    assert "because   inline declined at tanh: pinned by materialize\n" in out
    assert re.search(r"because   \w+ is a result\n", out)
    assert re.search(r"moves +4\.8 MB\n +computes +[0-9.]+ million operations\n +costs +[0-9.]+ us by the model\n", out)
    assert re.search(r"^2 kernels, 0 calls of PyTorch; 12\.1 MB moved", out, re.MULTILINE)


def test_explain_tells_what_is_computed_once(terrazzo: Terrazzo) -> None:
    code = "x = torch.randn(8, 64)\nw = torch.randn(48, 64)\nx @ (w / w.norm(dim=1, keepdim=True)).t()"
    out = terrazzo("explain", "-c", code, "--frozen", "w").stdout
    assert "runs      once: it depends on frozen inputs alone\n" in out
    assert "\n1 step of frozen inputs alone: computed once, and 12.3 kB kept\n1 kernel, 0 calls of PyTorch; " in out


LAYERS = """
from torch.nn import GELU, Linear, RMSNorm, Sequential
Sequential(*(Sequential(RMSNorm(96), Linear(96, 200), GELU(), Linear(200, 96)) for _ in range(6)))(torch.randn(8, 96))
"""


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
def test_explain_tells_equal_layers_once(target: str, terrazzo: Terrazzo) -> None:
    facts = json.loads(terrazzo("explain", "-c", LAYERS, "--target", target, "--json").stdout)
    out = terrazzo("explain", "-c", LAYERS, "--target", target).stdout
    heads = [int(n) for n in re.findall(r"^=== (\d+): ", out, re.MULTILINE)]
    groups = {n: [k for k, f in enumerate(facts) if f["alike"] == n] for n in heads}
    assert sorted(n for group in groups.values() for n in group) == list(range(len(facts)))
    assert any(len(group) >= 5 for group in groups.values()) and len(facts) >= 2.5 * len(heads)
    for group in groups.values():
        assert all(facts[n][k] == facts[group[0]][k] for n in group for k in ("bytes", "operations", "work"))
    costs = [sum(facts[n]["price_ns"] for n in groups[head]) for head in heads]
    assert costs == sorted(costs, reverse=True)
    largest = max(groups.values(), key=len)
    assert f"{len(largest)} of them, " in out and f" together: also {', '.join(map(str, largest[1:]))}\n" in out
    totals = re.findall(r"^(products|reductions|pointwise) +(\d+) kernels? .* (\d+)%$", out, re.MULTILINE)
    assert sum(int(n) for _, n, _ in totals) == len(facts) and 99 <= sum(int(p) for *_, p in totals) <= 101


def test_explain_does_not_take_different_kernels_for_equal(terrazzo: Terrazzo) -> None:
    """The same shapes and the same work, but other functions or another order of the operands."""
    code = "x, y = torch.randn(64, 64), torch.randn(64, 64)\n(x.sum(0) - 1, y.sum(1) - 1, x.amax(0) - 1, x.sum(1) - 2)"
    facts = json.loads(terrazzo("explain", "-c", code, "--no-fuse", "--target", "cpu", "--json").stdout)
    reductions = [f["alike"] for f in facts if f["work"] == "reductions"]
    assert len(reductions) == 4 and len(set(reductions)) == 3


def test_explain_names_what_pytorch_runs(terrazzo: Terrazzo) -> None:
    facts = json.loads(
        terrazzo("explain", "-c", "torch.mode(torch.randn(4,4,4))[0]+1", "--allow-fallback", "--json").stdout
    )
    assert [f["kind"] for f in facts] == ["call", "kernel"]
    assert facts[0]["because"] == ["PyTorch runs it: no rule lowers it"]
    assert facts[0]["source"] == "<code>:1"
    # 16 numbers are read and 16 written, after 16 additions
    assert (facts[1]["bytes"], facts[1]["operations"]) == (128, 16)


@pytest.mark.parametrize("code", [SOFTMAX, RMS_NORM])
def test_run_checks_against_eager(terrazzo: Terrazzo, code: str) -> None:
    out = terrazzo("run", "-c", code, "--check").stdout
    assert re.search(
        r"error against float64 \(rmse\): ours \S+e-\d+, eager's \S+e-\d+\n"
        r"largest difference from eager: \S+\ncheck: ok\n",
        out,
    )


def test_run_interprets(terrazzo: Terrazzo) -> None:
    found = json.loads(terrazzo("run", "-c", SOFTMAX, "--interpret", "--check", "--json").stdout)
    assert found["check"]["ok"] and found["results"] == ["f32[8, 128]"]


def test_run_times_both(terrazzo: Terrazzo) -> None:
    out = terrazzo("run", "-c", SOFTMAX, "--time").stdout
    assert re.search(
        r"^terrazzo: .* \(median of \d+; .* to .*\)\neager: .*\nspeed: +[0-9.]+x of eager$", out, re.MULTILINE
    )


def test_run_takes_any_stage(terrazzo: Terrazzo, tmp_path: Path) -> None:
    terrazzo("compile", "-c", SOFTMAX, "--dump", str(tmp_path))
    for ir, name in (("torch", "00-torch.txt"), ("tensor", "01-tensor.txt"), ("loop", "03-fused.txt")):
        assert "check: ok" in terrazzo("run", "--from", ir, str(tmp_path / name), "--check").stdout


def test_a_wrong_result_is_exit_code_1(terrazzo: Terrazzo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from terrazzo.run.compiled import Compiled

    call = Compiled.__call__
    monkeypatch.setattr(Compiled, "__call__", lambda self, inputs: [r + 1e-3 for r in call(self, inputs)])
    out = terrazzo("run", "-c", SOFTMAX, "--check", code=1).stdout
    assert re.search(r"check: result 0: error 1\.00e-03 is above \S+\n", out)


def test_a_model_with_random_weights(terrazzo: Terrazzo) -> None:
    pytest.importorskip("transformers")
    words = ("gpt2", "--layer", "0", "--seq-len", "8", "--random-weights")
    assert "check: ok" in terrazzo("run", *words, "--check").stdout
    assert terrazzo("compile", *words).stdout.count("===\n") < 20


def test_the_version_and_the_help(terrazzo: Terrazzo) -> None:
    assert re.fullmatch(r"terrazzo (from source|\d+\.\d+\S*)\n", terrazzo("--version").stdout)
    assert terrazzo().stdout.startswith(terrazzo("--help").stdout.split("[OPTIONS]")[0])


def test_targets(terrazzo: Terrazzo) -> None:
    assert [t["name"] for t in json.loads(terrazzo("targets", "--json").stdout)] == ["cpu", "interpreter", *GPUS]
    assert re.search(r"^interpreter +ready +numpy", terrazzo("targets").stdout, re.MULTILINE)


def test_doctor(terrazzo: Terrazzo, cache_dir: Path) -> None:
    lines = {line.split()[0]: line for line in terrazzo("doctor").stdout.splitlines()}
    assert {"python", "torch", "compiler", "cores", "driver", "nvrtc", "cache"} <= lines.keys()
    assert re.fullmatch(r"torch +ok +\d\S+", lines["torch"])
    assert str(cache_dir) in lines["cache"]


def test_doctor_says_what_to_do_without_a_compiler(terrazzo: Terrazzo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrazzo.run.compiler._candidates", lambda: iter(()))
    assert re.search(r"^compiler +missing +`apt install g\+\+` or", terrazzo("doctor").stdout, re.MULTILINE)
    found = {f["name"]: f for f in json.loads(terrazzo("doctor", "--json").stdout)}
    assert (found["compiler"]["ok"], found["compiler"]["found"]) == (False, "")


def test_doctor_finds_only_what_is_there(terrazzo: Terrazzo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = json.loads(terrazzo("doctor", "--json", code=1).stdout)
    assert {"torch", "transformers", "compiler", "driver"} <= {f["name"] for f in found if not f["ok"]}
    assert all(bool(f["found"]) == f["ok"] and bool(f["advice"]) != f["ok"] for f in found)


@pytest.mark.parametrize("kind", ["shared", "file", "read-only"])
def test_doctor_and_run_agree_on_the_cache(
    kind: str, terrazzo: Terrazzo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "cache"
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(place))
    if kind == "file":
        place.write_text("")
    else:
        place.mkdir()
        place.chmod(0o777 if kind == "shared" else 0o500)
    may = os.access  # which lets root write anywhere
    monkeypatch.setattr("os.access", lambda path, mode: (kind != "read-only" or path != place) and may(path, mode))
    lines = {line.split()[0]: line for line in terrazzo("doctor").stdout.splitlines()}
    assert lines["compiler"].split()[1] == "ok"
    told = {"shared": "other users can write in", "file": "is not a directory", "read-only": "cannot be written"}
    assert lines["cache"].split()[1] == "missing" and told[kind] in lines["cache"]
    if kind == "shared":
        assert lines["cache"].split(None, 2)[2] in terrazzo("run", "-c", "torch.relu(torch.randn(3))", code=2).stderr


def test_cache_is_counted_and_cleared(terrazzo: Terrazzo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "mine"))
    assert json.loads(terrazzo("cache", "status", "--json").stdout)["entries"] == 0
    terrazzo("run", "-c", "torch.relu(torch.randn(3))")
    entries = json.loads(terrazzo("cache", "status", "--json").stdout)["entries"]
    assert entries > 0
    assert f"removed {entries} entries" in terrazzo("cache", "clear").stdout
    assert ": 0 entries, 0 B of at most 2.1 GB" in terrazzo("cache", "status").stdout


def test_bench_writes_a_record(terrazzo: Terrazzo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from terrazzo.bench import report, suites

    some = suites.chains()[1:3]
    monkeypatch.setitem(suites.SUITES, "chains", lambda: some)
    file = tmp_path / "chains.json"
    out = terrazzo("bench", "cpu", "--suite", "chains", "--seconds", "0.01", "--json", str(file)).stdout
    assert re.search(r"^chains: [0-9.]+x of eager, the geometric mean$", out, re.MULTILINE)
    record = json.loads(file.read_text())
    assert {"commit", "date", "versions", "cpu", "threads", "geomean"} <= record.keys()
    assert [c["name"] for c in record["cases"]] == [c.name for c in some]
    assert all(c["problem"] == "" and c["eager"]["measurements"] >= 7 for c in record["cases"])
    assert f"| {some[0].name} |" in report.page(tmp_path)


@pytest.mark.parametrize(("flag", "rough"), [("--tf32", True), ("--no-tf32", False)])
def test_convolutions_are_as_pytorchs_switch_has_them(terrazzo: Terrazzo, flag: str, rough: bool) -> None:
    code = "torch.nn.Conv2d(64, 64, 3)(torch.zeros(8, 64, 58, 58))"
    with torch.backends.cudnn.flags(enabled=True):
        done = terrazzo("compile", flag, "--target", "sm_90a", "--ir", "tensor", "-c", code)
        assert torch.backends.cudnn.allow_tf32 == rough
    assert ("tf32_mul" in done.stdout) == rough
