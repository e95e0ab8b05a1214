"""What is written so that compilers make vectors of it."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.run.cpu import COMPILER

import terrazzo
from terrazzo.options import Options
from terrazzo.run.cache import Cache
from terrazzo.run.compiler import find_compiler
from terrazzo.targets.cpu.emit import prelude

torch = pytest.importorskip("torch")
F = torch.nn.functional
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def compiled(fn: Any, tmp_path: Path, *inputs: Any) -> str:
    """The kernels of a function, as C++ without the prelude; its results are eager's."""
    call = terrazzo.compile(fn, *inputs, options=Options(target="cpu", cache_dir=tmp_path))
    found, exact = call(*inputs), fn(*(x.double() if x.is_floating_point() else x for x in inputs))
    torch.testing.assert_close(found.double(), exact.double(), rtol=1e-5, atol=1e-6)
    return "\n".join(source[source.index('extern "C" int k_') :] for _, source in call.compiled.sources)


def test_masks_are_read_as_bytes_by_as_many_lanes_as_vectors_of_bytes_have(tmp_path: Path) -> None:
    """GCC has no vectors of bools in memory, and wrote 16 lanes out: a masked softmax took ten times as long."""
    torch.manual_seed(0)
    x, mask = torch.randn(16, 128), torch.rand(128) > 0.5
    text = compiled(lambda x, mask: x.masked_fill(mask, float("-inf")).softmax(-1), tmp_path, x, mask)
    assert "const u8* __restrict" in text and "bool* __restrict" not in text
    assert "reduce, 64 at a time" in text and "reduce, 16 at a time" not in text


def test_truths_in_memory_are_truths(tmp_path: Path) -> None:
    """Of bytes, `~` is no `not`."""
    torch.manual_seed(0)
    x, y = torch.rand(40, 70) > 0.5, torch.rand(40, 70) > 0.5
    compiled(lambda x, y: ~(x & ~y) ^ y, tmp_path, x, y)
    compiled(lambda x, y: (~x).sum(-1) + (x | ~y).any(0)[:40] + (~y).cumsum(-1)[:, 3], tmp_path, x, y)


def test_sine_and_cosine_of_one_angle_are_no_call_of_both(tmp_path: Path) -> None:
    """GCC makes one call of both, which has no vector form."""
    torch.manual_seed(0)
    x = torch.randn(2000)
    compiler = find_compiler(None, Cache(tmp_path, 1 << 30))
    if compiler is None or "-DTZ_VECTOR_MATH" not in compiler.flags:
        pytest.skip("the compiler has no vector forms from the C library")
    compiled(lambda x: x.sin() * x.cos(), tmp_path, x)
    (library,) = (p for p in tmp_path.rglob("*.so") if b"k_" in p.read_bytes())
    found = library.read_bytes()
    assert b"sincos" not in found and b"cosf" in found


def test_every_number_of_float16_is_read_and_rounded_as_pytorch_does(tmp_path: Path) -> None:
    """Both conversions are arithmetic on bits. Numbers halfway between two are rounded too, and those next to them."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    read = terrazzo.compile(lambda x: x.float(), every, options=Options(target="cpu", cache_dir=tmp_path))
    torch.testing.assert_close(read(every), every.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(read(every).signbit(), every.signbit())

    finite = every[every.isfinite()].float().sort().values
    halfway = (finite[1:] + finite[:-1]) / 2
    ends = torch.tensor(
        [0.0, -0.0, 65519.99, 65520.0, 1e30, -1e30, float("inf"), -float("inf"), float("nan"), -float("nan")]
    )
    wide = torch.cat([finite, halfway, halfway.nextafter(ends[6]), halfway.nextafter(ends[7]), ends])
    rounded = terrazzo.compile(lambda x: x.half(), wide, options=Options(target="cpu", cache_dir=tmp_path))
    torch.testing.assert_close(rounded(wide), wide.half(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rounded(wide).signbit(), wide.signbit())


RUNS = {
    "pointwise": (lambda x, w: (x.float() * 3 + w.float()).half(), 1),
    "rows": (lambda x, w: (x.float() / x.float().pow(2).mean(-1, keepdim=True) * w.float()).half(), 2),
    "columns": (lambda x, w: (x.float() * w.float()).sum(0).half(), 1),
    "scores": (lambda x, w: x.float().softmax(-1).half(), 1),
}
"""Functions of float16, and how many loops of each have runs."""


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [32, 71, 300])
def test_runs_of_float16_are_converted_by_the_processors_instruction(name: str, width: int, tmp_path: Path) -> None:
    """Around the loops over lanes; compilers have no vectors of that instruction."""
    torch.manual_seed(0)
    function, loops = RUNS[name]
    x, w = torch.randn(40, width).half(), torch.randn(width).half()
    call = terrazzo.compile(function, x, w, options=Options(target="cpu", cache_dir=tmp_path))
    torch.testing.assert_close(call(x, w), function(x, w), rtol=1e-3, atol=1e-6)
    text = "\n".join(source[source.index('extern "C" int k_') :] for _, source in call.compiled.sources)
    assert text.count("tz_widen_run(") >= loops


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="no x86")
@pytest.mark.parametrize(("march", "register"), [("skylake-avx512", "zmm"), ("haswell", "ymm")])
def test_runs_of_float16_are_converted_in_whole_vectors(march: str, register: str) -> None:
    """What is stored in halves of a vector waits until it is read whole: a softmax took twice as long."""
    assert COMPILER is not None
    body = "tz_widen_run(x, y, 640); tz_narrow_run(y, z, 640);"
    source = prelude() + f'extern "C" void f(const f16* x, float* y, f16* z) {{ {body} }}'
    command = [COMPILER, "-std=c++17", "-O3", f"-march={march}", "-S", "-x", "c++", "-", "-o", "-"]
    text = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    for name in ("vcvtph2ps", "vcvtps2ph"):
        assert re.search(rf"{name}\b.*%{register}", text)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="no x86")
@pytest.mark.parametrize("name", ["min", "max", "fmin", "fmax"])
def test_the_least_of_a_short_row_has_vectors(name: str) -> None:
    """With NaN asked for first, GCC had branches: the least of 8 numbers in a row took 14 times as long."""
    assert COMPILER is not None
    loop = f"float m = x[8 * i]; for (int k = 0; k < 8; k++) m = tz_{name}(m, x[8 * i + k]); y[i] = m;"
    head = 'extern "C" void f(const float* __restrict x, float* __restrict y, int n)'
    source = prelude() + f"{head} {{ for (int i = 0; i < n; i++) {{ {loop} }} }}"
    flags = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-march=haswell"]
    command = [COMPILER, *flags, "-S", "-x", "c++", "-", "-o", "-"]
    text = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"v{name[-3:]}ps\b", text)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="no x86")
def test_angles_that_are_chosen_by_a_condition_have_vectors(tmp_path: Path) -> None:
    """GCC computes calls where they are chosen only, and not those that it does not know in vectors: half of eager's
    speed, where eager computes all. Of both a sine and a cosine it would make one call, without vectors.
    """
    assert COMPILER is not None
    x, y = torch.randn(4096), torch.randn(4096)
    text = compiled(lambda x, y: torch.where(x < 0.1, x.sin(), y), tmp_path, x, y)
    assert "std::sin(" in text and "tz_sin(" not in text
    both = compiled(lambda x, y: torch.where(x < 0.1, x.sin(), x.cos() * y), tmp_path, x, y)
    assert "tz_sin(" in both and "tz_cos(" in both and "std::" not in both
    if "clang" in subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout:
        return
    flags = [
        "-std=c++17",
        "-O3",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fopenmp",
        "-DTZ_VECTOR_MATH",
        "-march=haswell",
    ]
    command = [COMPILER, *flags, "-S", "-x", "c++", "-", "-o", "-"]
    made = subprocess.run(command, input=prelude() + text, capture_output=True, text=True, check=True).stdout
    assert re.search(r"call\s+_ZGVdN8v_sinf", made)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_rounded_and_widened_again_stays_in_32_bits(dtype: Any, tmp_path: Path) -> None:
    """Nothing is packed and taken apart, and every number is what the two conversions make of it."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    finite = every[every.isfinite()].sort().values
    halfway = (finite[1:].double() + finite[:-1].double()).div(2).float()
    ends = torch.tensor([65519.99, 65520.0, 3.39e38, -3.4e38, float("inf"), -float("inf"), float("nan"), 1e-40])
    up, down = ends[4], ends[5]
    x = torch.cat([every, halfway, halfway.nextafter(up), halfway.nextafter(down), finite.nextafter(up), ends])
    call = terrazzo.compile(lambda x: x.to(dtype).float(), x, options=Options(target="cpu", cache_dir=tmp_path))
    assert any("= tz_rounded<" in source for _, source in call.compiled.sources)
    torch.testing.assert_close(call(x), x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(call(x)[x == x].signbit(), x[x == x].signbit())


@pytest.mark.parametrize("shape", [(300, 96), (2048, 300), (100, 17)])
def test_tall_columns_are_reduced_in_pieces_that_threads_share(shape: tuple[int, int], tmp_path: Path) -> None:
    """Of rows as they lie, and what pieces come to is combined in order: results do not depend on the threads."""
    torch.manual_seed(0)
    x, g = torch.randn(shape), torch.randn(shape)

    def fn(x: Any, g: Any) -> Any:
        var, mean = torch.var_mean(x, 0)
        return (g * (x - mean)).sum(0) * var.rsqrt(), (x.amax(0), g.argmin(0), (x > 3).any(0), mean)

    options = [Options(target="cpu", cache_dir=tmp_path, threads=threads) for threads in (1, 2, 3)]
    calls = [terrazzo.compile(fn, x, g, options=o) for o in options]
    results = [call(x, g) for call in calls]
    text = "\n".join(source[source.index('extern "C" int k_') :] for _, source in calls[0].compiled.sources)
    assert ("int64_t chunk" in text) is (shape[0] > 128)
    exact = fn(x.double(), g.double())
    torch.testing.assert_close(results[0], fn(x, g), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[0][0].double(), exact[0], rtol=1e-4, atol=1e-4)
    assert all(torch.equal(results[0][0], r[0]) and torch.equal(results[0][1][3], r[1][3]) for r in results[1:])


def test_truths_become_floats_in_vectors(tmp_path: Path) -> None:
    """GCC has no vectors of that conversion beside calls of the C library: a loss of logits took ten times as long."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 50), torch.randn(40, 50)
    compiler = find_compiler(None, Cache(tmp_path, 1 << 30))
    if compiler is None or "-DTZ_VECTOR_MATH" not in compiler.flags:
        pytest.skip("the compiler has no vector forms from the C library")
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    compiled(lambda x, y: loss(x, (y > 0).to(x.dtype)), tmp_path, x, y)
    (library,) = (p for p in tmp_path.rglob("*.so") if b"k_" in p.read_bytes())
    assert b"_ZGV" in library.read_bytes()


def test_the_tail_of_a_gelu_is_no_worse_than_that_of_an_error_function(tmp_path: Path) -> None:
    x = torch.linspace(-9, 9, 4096)
    x[:4] = torch.tensor([float("nan"), float("inf"), 0.0, -1e6])
    gelu = torch.nn.functional.gelu
    ours = terrazzo.compile(gelu, x, options={"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER})(x)
    assert ours[0].isnan() and ours[1].isinf() and ours[2] == 0 and ours[3] == 0
    exact, eager = gelu(x[4:].double()), gelu(x[4:])
    for some in (x[4:] < -2, x[4:] < 1, x[4:] < 9):
        found, theirs = ((t - exact)[some].abs().max() for t in (ours[4:], eager))
        assert found <= 2 * theirs


def test_places_that_are_only_compared_are_looked_at_once(tmp_path: Path) -> None:
    """And in 32 bits: the gradient of a loss asks of each class whether it is the one that data says."""
    torch.manual_seed(0)
    x, label = torch.randn(2, 7, 90), torch.randint(7, (2, 90))

    def loss(x: Any, label: Any) -> Any:
        return x.softmax(1) - torch.zeros_like(x).scatter(1, label[:, None], 1.0)

    text = compiled(loss, tmp_path, x, label)
    assert "(int32_t)(int64_t)at" in text and text.count("tz_among(") == 1


def test_columns_of_a_tile_are_runs_where_results_lie_along_its_rows(tmp_path: Path) -> None:
    """GCC had no vectors of the steps from row to row beside float16: a gradient of a GELU took three times as long."""
    torch.manual_seed(0)
    given = [torch.randn(s).half() / 16 for s in ((256, 256), (1024, 256), (1024,), (256, 1024), (256,), (256, 256))]

    def gradients(x: Any, w: Any, b: Any, v: Any, c: Any, grad: Any) -> Any:
        net = lambda x, w: F.linear(F.gelu(F.linear(x, w, b)), v, c)  # noqa: E731
        return torch.func.vjp(net, x, w)[1](grad)

    call = terrazzo.compile(gradients, *given, options=Options(target="cpu", cache_dir=tmp_path))
    wide = [x.double() for x in given]
    for ours, eager, exact in zip(call(*given), gradients(*given), gradients(*wide), strict=True):
        off, theirs = ((x.double() - exact).abs().max() for x in (ours, eager))
        assert off <= 2 * theirs
    (text,) = (source for _, source in call.compiled.sources if "erff(v" in source)
    point = text[text.rindex("#pragma omp simd", 0, text.rindex("erff(v")) :]
    assert all(x.endswith("+ j]") for x in re.findall(r"tile\[\d\]\[[^\]]*\]", point))


def test_what_a_place_takes_long_to_find_is_found_once(tmp_path: Path) -> None:
    """A search gives two places: steps within the row need no check, and the second is not searched for again."""
    torch.manual_seed(0)
    ends, at = torch.rand(40, 33).cumsum(1), 20 * torch.rand(40, 90)
    ends[:, 5:8] = ends[:, 4:5]

    def between(ends: Any, at: Any) -> Any:
        k = torch.searchsorted(ends, at, right=True)
        low, high = ends.gather(1, (k - 1).clamp(min=0)), ends.gather(1, k.clamp(max=32))
        return (low + high) / 2

    text = compiled(between, tmp_path, ends, at)
    assert "kept" in text and 5 <= text.count("tz_shr(") <= 8 and text.count("tz_among(") == 1


def test_numbers_known_before_a_shared_loop_are_there_by_value(tmp_path: Path) -> None:
    """By reference they may be what was just stored: the gradient of a Huber loss, which chooses between multiples of
    one number, was no vectors.
    """
    torch.manual_seed(0)
    x, y, grad = torch.randn(300, 90), torch.randn(300, 90), torch.randn(())

    def gradient(x: Any, y: Any, grad: Any) -> Any:
        off = x - y
        return torch.where(off < -1, -grad / 3, torch.where(off > 1, grad / 3, off * (grad / 3)))

    text = compiled(gradient, tmp_path, x, y, grad)
    (shared,) = re.findall(r"#pragma omp parallel.* firstprivate\((.*)\)", text)
    before, _, loop = text.partition("#pragma omp parallel")
    known = {name for name in re.findall(r"\n  const \w+ (\w+) = ", before) if re.search(rf"\b{name}\b", loop)}
    assert {*shared.split(", ")} == known and len(known) >= 2
