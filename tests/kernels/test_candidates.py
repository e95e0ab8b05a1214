"""A kernel that cannot be built is a candidate that lost: the next schedule is taken, down to a plain one. No GPU is
needed for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import CASES, lowered, programs

from terrazzo.errors import CompilerBug, Limitation, UserError
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp import loop
from terrazzo.interp.torch import call_numpy
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.text import parse, show
from terrazzo.ir.types import bf16
from terrazzo.ir.verify_kernel import declared
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile import choose
from terrazzo.rules.loop_to_tile.candidates import candidates
from terrazzo.rules.loop_to_tile.experience import Experience
from terrazzo.rules.tile.complete import Refused
from terrazzo.run import cuda, nvrtc
from terrazzo.run.cache import Cache
from terrazzo.run.cpu import Built
from terrazzo.run.cuda import build, emit_all
from terrazzo.run.nvrtc import Facts, Tried, known

pytest.importorskip("cuda.bindings")
try:
    nvrtc.nvrtc_version()
except Limitation as why:
    pytest.skip(str(why), allow_module_level=True)

ARCH = "sm_90a"
BF16 = torch.bfloat16


def e(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def wide_norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (53248,))


def mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


HALVES = e(256, 256, dtype=BF16), e(256, 256, dtype=BF16)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path, 1 << 30)


def compiled(cache: Cache, fn: Any, *args: torch.Tensor, refuses: Any = None, **options: Any) -> Built:
    """What is built of a function for a GPU that need not be there."""
    chosen = Options(target=ARCH, cache_dir=cache.directory, **options)
    done = lowering(capture(fn, args, {}).program, chosen, tried=Tried(ARCH, cache, chosen.spills))
    return build(done, chosen, cache, ARCH, **({"refuses": refuses} if refuses else {}))


def lost(built: Built) -> list[str]:
    """Why schedules lost, as the log has it."""
    return [e.reason.split("it lost: ")[1] for e in built.lowering.log.events if "it lost: " in e.reason]


def taken(built: Built) -> list[str]:
    events = built.lowering.log.events
    return [f"{e.rule}: {e.reason}" for e in events if e.fired and e.pass_name == "schedule"]


def at_most(monkeypatch: pytest.MonkeyPatch, registers: int) -> list[str]:
    """From here on a thread that wants more registers spills. Gives the list of the sources that are compiled."""
    real, sources = nvrtc._compile, []

    def limited(source: str, arch: str) -> tuple[bytes | None, Facts]:
        sources.append(source)
        cubin, facts = real(source, arch)
        over = facts.registers - registers
        said = f"ptxas info : {4 * over} bytes spill stores"
        return cubin, replace(facts, spilled=4 * over, told=(said,)) if over > 0 else facts

    monkeypatch.setattr(nvrtc, "_compile", limited)
    return sources


def test_a_schedule_that_spills_gives_way_to_the_next(cache: Cache) -> None:
    built = compiled(cache, wide_norm, e(1024, 53248))
    assert lost(built) and all(
        "spills" in why and "bytes of registers to memory (64 registers)" in why for why in lost(built)
    )
    facts = [known(source, ARCH, cache) for _, source in built.sources]
    assert all(f and not f.spilled and f.registers for f in facts)
    assert taken(built)[0].startswith("share: threads share")  # not a thread a row
    assert len(built.paths) == len(built.sources) == 1


def test_where_spills_are_accepted_the_first_schedule_runs(cache: Cache) -> None:
    built = compiled(cache, wide_norm, e(1024, 53248), spills=True)
    ((_, source),) = built.sources
    facts = known(source, ARCH, cache)
    assert not lost(built) and facts is not None and facts.spilled
    assert lost(compiled(cache, wide_norm, e(1024, 53248)))  # what was accepted once is not so ever after


def test_what_was_learned_is_kept(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = at_most(monkeypatch, 40)
    first = compiled(cache, mm, *HALVES)
    assert len(sources) >= 2 and lost(first)
    sources.clear()
    again = compiled(Cache(cache.directory, 1 << 30), mm, *HALVES)
    assert not sources and again.sources == first.sources and lost(again) == lost(first)


def test_after_matrix_instructions_come_cuda_cores_and_a_plain_schedule_and_the_one_that_spills_least_runs(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_most(monkeypatch, 1)
    built = compiled(cache, mm, e(16, 64, dtype=BF16), e(64, 16, dtype=BF16))
    tried = [e.rule + e.reason for e in built.lowering.log.events if "it lost: " in e.reason]
    kinds = list(dict.fromkeys(next((x for x in ("wgmma", "mma", "CUDA cores") if x in t), "none") for t in tried))
    assert {*kinds[:2]} == {"wgmma", "mma"} and kinds[2:] == ["CUDA cores"]
    (chosen,) = taken(built)
    assert (
        chosen.startswith("tile: ") and "it runs all the same, for what is left reads memory for every point" in chosen
    )
    assert [p.read_bytes()[:4] for p in built.paths.values()] == [b"\x7fELF"]


def test_what_another_process_builds_in_time_has_not_lost(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its facts take the place of those of a compilation that took too long, while others are not waited for."""

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.cumsum(0), x.sum(1)

    real, asked = cuda.compile_each, []

    def each(sources: Sequence[str], arch: str, cache: Cache, enough: Any) -> dict[str, nvrtc.Made]:
        asked.append(len(sources))
        made = real(sources, arch, cache, enough)
        return made if len(asked) > 1 else dict(list(made.items())[:1])

    monkeypatch.setattr(cuda, "compile_each", each)
    built = compiled(cache, both, e(64, 96))
    assert asked == [2, 2] and len(built.paths) == 2 and not lost(built)


def test_a_source_that_does_not_compile_lost_too(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    real = nvrtc._compile

    def broken(source: str, arch: str) -> tuple[bytes | None, Facts]:
        return real(source.replace("mma.sync", "frob.sync").replace("wgmma.mma_async", "wgmma.frob"), arch)

    monkeypatch.setattr(nvrtc, "_compile", broken)
    built = compiled(cache, mm, e(16, 64, dtype=BF16), e(64, 16, dtype=BF16))
    assert set(lost(built)) == {"the CUDA generated for it does not compile"}
    assert "on CUDA cores" in taken(built)[0]


class Lost(Experience):
    """Some sources lost, which cannot be built or spill so many bytes."""

    def __init__(self, sources: dict[str, float]) -> None:
        self.sources = sources

    def lost(self, kernel: k.Kernel) -> str:
        return "it is said to be lost" if nvrtc.emitted(kernel) in self.sources else ""

    def spilled(self, kernel: k.Kernel) -> float:
        return self.sources[nvrtc.emitted(kernel)]


def gated(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Two products that have no factor in common, which are kernels of their own."""
    return F.silu(x @ w.T) * (y @ u.T)


ROWS, COLUMNS = e(2048, 4096, dtype=BF16), e(14336, 4096, dtype=BF16)
GATED = ROWS, COLUMNS, ROWS.clone(), COLUMNS.clone()


def scheduled(
    fn: Any, given: tuple[torch.Tensor, ...], sources: dict[str, float]
) -> tuple[list[str], list[Any], list[str]]:
    """What the steps of a function are called, their schedules, and their sources, where some lost."""
    given = tuple(x.to("meta") for x in given)
    options = Options(target=ARCH, libraries="never")
    done = lowering(capture(fn, given, {}).program, options, tried=Lost(sources))
    tiles = done.at("tile")
    return (
        [s.name for s in tiles.loop.steps],
        [x for _, x in tiles.schedules],
        [text for _, text in emit_all(done.at("kernel"), ARCH)[1]],
    )


def test_where_one_of_several_kernels_lost_only_that_one_is_chosen_again() -> None:
    names, schedules, sources = scheduled(gated, GATED, {})
    again, others, _ = scheduled(gated, GATED, {sources[0]: float("inf")})
    assert again == names == ["mul_sum0", "mul"]
    assert others[0] != schedules[0] and others[1] == schedules[1]
    assert "wgmma" in str(others[0])


def test_a_product_that_spills_a_little_is_better_than_one_that_reads_memory_for_every_point() -> None:
    lost: dict[str, float] = {}
    for n in range(500):
        _, schedules, sources = scheduled(mm, (e(64, 64, dtype=BF16),) * 2, lost)
        if sources[0] in lost:
            break
        lost[sources[0]] = 8.0 if n == 3 else 800.0
    assert lost[sources[0]] == 8.0 and "mma" in str(schedules[0])


def test_what_the_driver_does_not_load_lost_too(cache: Cache) -> None:
    refused: list[str] = []

    def refuses(entry: Any, path: Path) -> str:
        refused.extend([entry.key] if not refused else [])
        return "the CUDA driver refuses cuModuleLoadData: INVALID_IMAGE" if entry.key in refused else ""

    built = compiled(cache, mm, *HALVES, refuses=refuses)
    assert lost(built) == ["the CUDA driver refuses cuModuleLoadData: INVALID_IMAGE"]
    assert not {entry.key for entry in built.entries.values()} & {*refused}
    assert not lost(compiled(cache, mm, *HALVES))  # which may have been the driver's trouble: it is not kept


def test_where_nothing_can_be_built_it_is_a_bug(cache: Cache) -> None:
    with pytest.raises(CompilerBug, match=r"kernel relu: the CUDA driver refuses it:\n") as bug:
        compiled(cache, torch.relu, e(64), refuses=lambda entry, path: "the CUDA driver refuses it")
    assert "To reproduce:\nnvcc -cubin" in str(bug.value)


SERIAL = """\
with schedule("mm", target="sm_90a"):
    a0 = grid(256)
    a1 = grid(8) * lane(32)
"""


def test_what_the_user_wrote_is_not_replaced(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    at_most(monkeypatch, 1)
    with pytest.raises(
        UserError, match=r"kernel mm: it spills \d+ bytes of registers .*\nptxas info : \d+ bytes spill stores"
    ):
        compiled(cache, mm, *HALVES, schedules=(SERIAL,))
    options = Options(target=ARCH, cache_dir=cache.directory)
    mine = lowering(capture(mm, HALVES, {}).program, options)
    for ir in ("tile", "kernel"):
        text = parse(show(mine.at(ir)))
        with pytest.raises(UserError, match="kernel mm: it spills"):
            build(lowering(text, options), options, cache, ARCH)


# --- over the machine's limits, which is known before anything is compiled ---


def many(count: int) -> Callable[..., torch.Tensor]:
    """Products of one factor, together one kernel."""
    return lambda x, w: sum(torch.tanh(x @ w[i]) for i in range(count))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_more_products_than_a_tile_has_room_for(arch: str) -> None:
    found = lowered(many(16), (e(8, 256, dtype=BF16), e(16, 256, 256, dtype=BF16)), arch)
    reasons = [e.reason for e in found.lowering.log.events if "it lost: " in e.reason]
    assert all("the schedule needs" in r or "registers" in r for r in reasons)
    assert len(found.kernels) >= 1


def test_an_unrolled_recurrent_net(cache: Cache) -> None:
    def net(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        h, states = x.new_zeros(8, 256), []
        for t in range(16):
            h = torch.tanh(F.linear(torch.cat([x[t], h], -1), w, b))
            states.append(h)
        return torch.stack(states)

    built = compiled(cache, net, e(16, 8, 256, dtype=BF16), e(256, 512, dtype=BF16), e(256, dtype=BF16))
    assert len(built.entries) >= 16


def test_a_kernel_that_no_schedule_fits_is_a_limitation(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Refused(UserError("the schedule needs 320 registers of a thread, and sm_90a has 255"))
    monkeypatch.setattr(choose, "derived", lambda *_: refused)
    with pytest.raises(
        Limitation, match="relu: no schedule of it fits sm_90a; the plainest does not, for the schedule needs 320"
    ):
        lowered(torch.relu, (e(64),), ARCH)


@pytest.mark.parametrize(("name", "target"), [p for p in programs() if p.values[1] == "sm_80"])
def test_the_plainest_schedule_always_exists_and_is_right(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = choose.candidates
    monkeypatch.setattr(choose, "candidates", lambda *given: [*every(*given)][-1:])
    torch.manual_seed(0)
    found = lowered(CASES[name].fn, CASES[name].make(), target)
    assert all(not kernel.shared for kernel in found.kernels)
    if name == "sum of very many" or sum(kernel.grid for kernel in found.kernels) > 2000:
        return  # one thread rounds 300,000 times; so many blocks, of a warp each, take the simulator long
    for ours, exact in zip(
        found.simulated(), loop.run(found.lowering.at("loop"), found.inputs, call=call_numpy), strict=True
    ):
        a, b = (np.asarray(x, np.float64) for x in (ours, exact))
        digits = {"bfloat16": 7, "float16": 10, "float64": 50}.get(ours.dtype.name, 18)
        np.testing.assert_allclose(a, b, rtol=0, atol=2.0**-digits * np.abs(b[np.isfinite(b)]).max(initial=0.0))


THREE = """@loop
def f(x: bf16[996, 768], q: bf16[768, 768], k: bf16[768, 768], v: bf16[768, 768], b: bf16[3, 768]):
    with kernel('z', x1=bf16[996, 768], x2=bf16[996, 768], z=bf16[996, 768]):
        for a0 in free(996):
            for a1 in free(768):
                for r0 in reduce(768):
                    acc0 <- sum(mul(f32(x[a0, r0]), f32(q[a1, r0])))
                    acc1 <- sum(mul(f32(x[a0, r0]), f32(k[a1, r0])))
                    acc2 <- sum(mul(f32(x[a0, r0]), f32(v[a1, r0])))
                x1[a0, a1] = bf16(add(acc0, f32(b[0, a1])))
                x2[a0, a1] = bf16(add(acc1, f32(b[1, a1])))
                z[a0, a1] = bf16(add(acc2, f32(b[2, a1])))
    return (x1, x2, z)
"""


def test_a_role_has_registers_for_all_it_declares() -> None:
    """Three sums, and what their results read, can be more than a warpgroup that multiplies has registers for."""
    (kernel,) = lowering(parse(THREE), Options(target="sm_90a")).at("kernel").steps
    roles = [s for s in k.walk(kernel.body) if isinstance(s, k.Role)]
    assert roles and all(declared(s.body) <= s.registers for s in roles)


ROWS_OF_ONE_DIMENSION = """
@loop
def f(x: bf16[10, 896, 256], w: bf16[8960, 256]):
    with kernel('y', y=f32[256, 256]):
        for a0 in free(256):
            for a1 in free(256):
                for r0, r1 in reduce(10, 896):
                    in0 = x[r0, r1, a0]
                    v0 = f32(in0)
                    in1 = w[r0 * 896 + r1, a1]
                    v1 = f32(in1)
                    v2 = mul(v0, v1)
                    acc0 <- sum(v2)
                y[a0, a1] = acc0
    return (y,)
"""


def test_pieces_of_a_part_of_a_dimension_are_equally_long() -> None:
    """Beyond the end of a short one lie other rows, and no zeros: it would be computed on CUDA cores."""
    done = lowering(parse(ROWS_OF_ONE_DIMENSION), Options(target="sm_90a"))
    first, *_ = done.at("tile").loop.steps
    (why,) = [e.reason for e in done.log.events if e.pass_name == "schedule" and e.fired and e.subject == first.name]
    assert "wgmma" in why and 896 % int(why.split()[0]) == 0


def test_a_chain_of_which_no_way_can_be_built_is_two_products() -> None:
    """What is left otherwise multiplies again for every result: a net of 16 images took 1.2 s for 0.9 ms (H100)."""

    def fn(x: Any, w: Any, r: Any, v: Any) -> Any:
        return (x @ w.mT + r) @ v.mT

    shapes = ((9000, 256), (128, 256), (9000, 128), (256, 128))
    args = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    (kernel,) = lowering(capture(fn, args).program, Options(target="sm_90a")).loop.steps
    found = list(candidates(kernel, gpu("sm_90a"), {}))  # type: ignore[arg-type]
    ways = [[rule for _, _, rule, _ in x.kernels] for x in found]
    last = max(n for n, rules in enumerate(ways) if rules == ["chain"])
    assert ways[last + 1] == ["tile", "tile"] and "factor_apart" in [rule for rule, *_ in found[last + 1].rewrites]
    factor, _ = (x for x, *_ in found[last + 1].kernels)
    assert factor.stores[0].buffer.type.dtype is bf16, "rounded as it is between them"
