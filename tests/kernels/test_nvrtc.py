"""Every kernel compiles for every architecture, and none spills registers to memory. No GPU is needed for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.kernels import by_hand
from tests.kernels.programs import CASES, TARGETS, case, lowered, swiglu

import terrazzo
from terrazzo.errors import Limitation, UserError
from terrazzo.ir.text import parse, show
from terrazzo.run.cache import Cache
from terrazzo.run.cuda import Cuda
from terrazzo.run.nvrtc import Facts, _facts, compile_each, cubin_key, failure, nvrtc_version
from terrazzo.targets.cuda.emit import emit

pytest.importorskip("cuda.bindings")
try:
    nvrtc_version()
except Limitation as why:
    pytest.skip(str(why), allow_module_level=True)

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")
ELF = b"\x7fELF"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path, 1 << 30)


def compile_all(sources: list[str], arch: str, cache: Cache) -> list[Path]:
    """A cubin for each source, with which nothing is wrong."""
    made = compile_each(sources, arch, cache)
    assert not {why for m in made.values() if (why := m.facts.problem())}
    return [path for source in sources if (path := made[source].path)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_kernels_compile(arch: str, cache: Cache) -> None:
    every = 1 if arch in TARGETS else 4
    names = list(sorted(CASES)[::every])
    sources = dict.fromkeys(emit(kernel)[1] for name in names for kernel in case(name, arch).kernels)
    assert len(sources) >= len(names)
    found = compile_all(list(sources), arch, cache)
    assert len({path.name for path in found}) == len(sources)
    assert all(path.read_bytes().startswith(ELF) for path in found)


@pytest.mark.parametrize("name", by_hand.MEANING)
def test_kernels_by_hand_compile(name: str, cache: Cache) -> None:
    compile_all([emit(kernel)[1] for kernel in by_hand.program(name).steps], "sm_90a", cache)


def e(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_large_ones_compile(arch: str, dtype: torch.dtype, cache: Cache) -> None:
    """The tiles of large products, long rows and splits, which are not simulated."""
    sources: dict[str, None] = {}
    for fn, shapes in (
        (F.linear, ((4096, 4096), (4096, 4096))),
        (F.linear, ((1024, 1000), (1000, 1000))),
        (F.linear, ((1, 4096), (4096, 4096))),
        (F.linear, ((16, 4096), (4096, 4096))),
        (F.linear, ((128, 8192), (128, 8192))),
        (lambda x, w, c: F.gelu(F.linear(x, w, c)), ((512, 1024), (4096, 1024), (4096,))),
        (swiglu, ((2048, 2048), (5632, 2048), (5632, 2048))),
        (lambda x: torch.softmax(x, -1), ((512, 32000),)),
        (lambda x, w: F.rms_norm(x, (8192,), w), ((64, 8192), (8192,))),
        (lambda x, w, c: F.layer_norm(x, (4096,), w, c), ((2048, 4096), (4096,), (4096,))),
        (lambda x, w: F.conv2d(x, w, padding=1), ((8, 64, 56, 56), (64, 64, 3, 3))),
        (lambda x: x.sum(), ((1 << 24,),)),
        (lambda x: x.argmax(-1), ((64, 128256),)),
    ):
        args = tuple(e(dtype, *s) for s in shapes)
        sources |= dict.fromkeys(emit(kernel)[1] for kernel in lowered(fn, args, arch).kernels)
    compile_all(list(sources), arch, cache)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_attention_does_not_spill(arch: str, width: int, cache: Cache) -> None:
    """One kernel for many queries, two for one query of heads in groups."""
    for queries, keys, count in (((4, 16, 2048), (4, 16, 2048), 1), ((1, 32, 1), (1, 8, 65536), 2)):
        q, kv = (e(torch.bfloat16, *s, width) for s in (queries, keys))
        found = lowered(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), (q, kv, kv), arch)
        assert len(found.kernels) == count
        compile_all([emit(kernel)[1] for kernel in found.kernels], arch, cache)


@pytest.mark.parametrize(("m", "n", "depth"), [(512, 512, 512), (33, 4096, 4096)])
def test_products_for_turing_do_not_spill(m: int, n: int, depth: int, cache: Cache) -> None:
    found = lowered(F.linear, (e(torch.float32, m, depth), e(torch.float32, n, depth)), "sm_75")
    compile_all([emit(kernel)[1] for kernel in found.kernels], "sm_75", cache)


def test_what_is_compiled_is_kept_and_looked_up(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    source = emit(case("gelu", "sm_90a").kernels[0])[1]
    (first,) = compile_all([source], "sm_90a", cache)
    monkeypatch.setattr("terrazzo.run.nvrtc._compile", lambda *a: pytest.fail("compiled again"))
    assert compile_all([source, source], "sm_90a", cache) == [first, first]
    assert cubin_key(source, "sm_90a") != cubin_key(source, "sm_80") != cubin_key(source + " ", "sm_80")


def test_kernels_that_differ_in_numbers_of_names_only_are_one() -> None:
    def layers(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.softmax(x * w, -1), torch.softmax(x * v, -1), torch.softmax(x * v, 0)

    found = lowered(layers, (torch.ones(64, 64),) * 3, "sm_90a", fuse=False).kernels
    sources = [emit(kernel)[1] for kernel in found]
    assert len(set(found)) == len(found) and len(set(sources)) < len(sources)


def test_text_compiles_as_the_kernel_it_is_of(cache: Cache) -> None:
    for name in ("softmax", "matmul of bfloat16", "embedding"):
        found = case(name, "sm_90a")
        read = parse(show(found.program))
        assert [emit(kernel) for kernel in read.steps] == [emit(kernel) for kernel in found.kernels]


def test_what_does_not_compile_is_told_with_its_source(cache: Cache) -> None:
    source = 'extern "C" __global__ void k_f() { frob(); }\n'
    for _ in range(2):  # the second time it is known
        (made,) = compile_each([source], "sm_90a", cache).values()
        assert made.path is None and made.facts.problem(spills=True) == "the CUDA generated for it does not compile"
    told = failure(made.facts.problem(), source, "sm_90a", made.facts, cache)
    assert told.startswith("kernel f: the CUDA generated for it does not compile:\n")
    assert 'identifier "frob" is undefined' in told
    command = told.splitlines()[-1]
    assert command.startswith("nvcc -cubin -arch=sm_90a -Xptxas -v ")
    assert "frob();" in Path(command.split()[-1]).read_text()


SPILLS = """extern "C" __global__ void __launch_bounds__(1024, 1) k_f(const float* x, float* y) {
  float a[200];
  #pragma unroll
  for (int i = 0; i < 200; i++) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 200; i++) y[i * 1024 + threadIdx.x] = a[i] * a[199 - i];
}
"""


def test_what_ptxas_says_is_kept(cache: Cache) -> None:
    for _ in range(2):
        (made,) = compile_each([SPILLS], "sm_90a", cache).values()
        assert made.path is not None and made.path.read_bytes().startswith(ELF)
        assert made.facts.registers == 64 and made.facts.spilled > 0
        assert made.facts.problem() == f"it spills {made.facts.spilled} bytes of registers to memory (64 registers)"
        assert made.facts.problem(spills=True) == ""


@pytest.mark.parametrize(
    "data", ["", "[]", "{}", '{"told": 3}', '{"told": [], "registers": "many"}', '{"told": [], "x": 1}']
)
def test_what_is_no_record_of_ours_is_compiled_again(data: str, cache: Cache) -> None:
    assert Facts.from_json(data.encode()) is None
    cache.put(cubin_key(SPILLS, "sm_90a"), ".json", data.encode())
    assert compile_each([SPILLS], "sm_90a", cache)[SPILLS].facts.registers == 64


def test_an_architecture_that_nvrtc_does_not_know(cache: Cache) -> None:
    with pytest.raises(Limitation, match=r"NVRTC \d+\.\d+ does not compile for sm_12"):
        compile_each([SPILLS], "sm_12", cache)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_runs_and_a_message_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match="the target sm_90a needs a GPU to run, and PyTorch sees none; `terrazzo compile --target sm_90a`",
    ):
        Cuda("cuda:0", "sm_90a")
    with pytest.raises(UserError, match="the target sm_80 needs a GPU to run"):
        terrazzo.compile(torch.relu, torch.ones(3), options={"target": "sm_80", "cache_dir": tmp_path})


ARRIVES = "ptxas info : (C7519) warpgroup.arrive is injected in around line 1552 by compiler to allow use of registers"
SERIAL = (
    "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient"
)
WAITS = "ptxas info : (C7520) warpgroup.wait is injected in around line 12 by compiler to allow use of registers"


@pytest.mark.parametrize(("told", "wrong"), [(ARRIVES, False), (SERIAL, True), (WAITS, True), (ARRIVES + WAITS, True)])
def test_a_kernel_is_serialised_where_ptxas_waits_and_not_where_it_adds_a_fence(told: str, wrong: bool) -> None:
    found = _facts(f"{told} in function 'k'\nptxas info : Used 168 registers", True)
    assert found.problem() == ("ptxas serialises its wgmma" if wrong else "") and found.runs


FORKS = """
import os, signal, sys
from pathlib import Path
from terrazzo.run.cache import Cache
from terrazzo.run.nvrtc import compile_each

cache = Cache(Path(sys.argv[1]), 1 << 30)
compile_each(['extern "C" __global__ void k_parent() {}'], "sm_90a", cache)
child = os.fork()
if not child:
    signal.alarm(60)
    source = 'extern "C" __global__ void k_child() {}'
    os._exit(0 if compile_each([source], "sm_90a", cache)[source].path else 1)
sys.exit(os.waitpid(child, 0)[1] != 0)
"""


def test_a_child_of_a_process_that_compiled_compiles(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
