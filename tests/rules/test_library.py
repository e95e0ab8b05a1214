"""Which ops of PyTorch are called where a library is faster, and that calling them changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import terrazzo
from terrazzo import pipelines
from terrazzo.bench.models import models, traced
from terrazzo.front.capture import capture
from terrazzo.hw import library, processor
from terrazzo.hw.gpu import GPUS
from terrazzo.interp import loop as interpreter
from terrazzo.interp.torch import call_numpy
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import topological
from terrazzo.ir.parse import parse
from terrazzo.ir.text import show
from terrazzo.options import Options
from terrazzo.pipelines import lowering, stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.layout.views import pass_views
from terrazzo.rules.torch_to_tensor.library import ONE, SEVERAL, Libraries, beside, price
from terrazzo.run.cpu import Cpu
from terrazzo.run.plan import Plan

BF16 = torch.bfloat16


def meta(*shape: int, dtype: Any = torch.float32, last: bool = False) -> Any:
    x = torch.empty(shape, dtype=dtype, device="meta")
    return x.to(memory_format=torch.channels_last) if last else x


def calls(fn: Callable[..., Any], *args: Any, target: str = "sm_90a", libraries: str = "auto") -> list[str]:
    """The ops that are called for this function."""
    options = Options(target=target, libraries=libraries)
    (program,) = (p for _, p, _ in stages(capture(fn, args).program, options, Log(), ("torch_to_tensor",)))
    return [n.name for n in opaque(program)]


def opaque(program: Any) -> list[Any]:
    """The calls of a program of Tensor IR."""
    from terrazzo.ir.dialects.tensor import Opaque
    from terrazzo.ir.node import topological

    return [n for n in topological(program.results) if isinstance(n, Opaque)]


def conv(x: Any, w: Any) -> Any:
    return F.conv2d(x, w, padding=w.shape[-1] // 2)


# What is slower by far on an H200 by the model, and was when it was measured (h200-baselines), or by how it is built.
SLOWER: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "many tensors side by side": (lambda *x: torch.cat(x, -1), (meta(8192, 128),) * 24, "cat"),
    "many that were converted": (
        lambda *x: torch.cat([(y.float() * 2).bfloat16() for y in x]),
        tuple(meta(2048, 512, dtype=BF16) for _ in range(24)),
        "cat",
    ),
    "a function in float64": (torch.digamma, (meta(4096, 8192),), "digamma"),
}  # fmt: skip
OURS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "3x3": (conv, (meta(32, 64, 56, 56, dtype=BF16, last=True), meta(64, 64, 3, 3, dtype=BF16, last=True))),
    "3x3 of f32": (conv, (meta(32, 64, 56, 56), meta(64, 64, 3, 3))),
    "transposed, to three channels": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=3, output_padding=1),
        (meta(32, 64, 112, 112, dtype=BF16), meta(64, 3, 7, 7, dtype=BF16)),
    ),
    "a scan of a long row": (lambda x: x.cumsum(-1), (meta(1 << 24),)),
    "what a mask takes": (
        lambda x, m, y: x.masked_scatter(m, y),
        (meta(5120, 5120), meta(5120, 5120, dtype=torch.bool), meta(5120, 5120)),
    ),
    "transposed, in 16 bits": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
        (meta(16, 128, 64, 64, dtype=BF16), meta(128, 64, 4, 4, dtype=BF16)),
    ),
    "transposed and dilated": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=3, dilation=2),
        (meta(16, 128, 64, 64, dtype=BF16), meta(128, 64, 4, 4, dtype=BF16)),
    ),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (meta(8, 512, 32, 32), meta(512, 256, 2, 2))),
    "few of many rows written": (
        lambda x, i, y: x.scatter(0, i, y),
        (meta(5120, 5120), meta(5, 5120, dtype=torch.int64), meta(5, 5120)),
    ),
    "a token copied to a cache": (
        lambda x, i, y: x.index_copy(2, i, y),
        (meta(8, 8, 4096, 128, dtype=BF16), meta(1, dtype=torch.int64), meta(8, 8, 1, 128, dtype=BF16)),
    ),
    "a linear layer of bf16": (F.linear, (meta(512, 3584, dtype=BF16), meta(18944, 3584, dtype=BF16))),
    "a linear layer of f32": (F.linear, (meta(512, 3584), meta(18944, 3584))),
    "a small product of f32": (torch.mm, (meta(1024, 1024), meta(1024, 1024))),
    "few rows of f32": (F.linear, (meta(32, 3584), meta(3584, 3584))),
    "batched products of f32": (lambda x, y: x @ y, (meta(12, 512, 64), meta(12, 64, 512))),
    "attention": (F.scaled_dot_product_attention, (meta(4, 16, 512, 64, dtype=BF16),) * 3),
    "a norm": (lambda x: F.layer_norm(x, x.shape[-1:]), (meta(4096, 4096),)),
    "long rows scanned": (lambda x: x.cumsum(-1), (meta(16, 1 << 20),)),
    "columns scanned": (lambda x: x.cumsum(0), (meta(4096, 4096),)),
    "three tensors side by side": (lambda *x: torch.cat(x, -1), (meta(8192, 1024), meta(8192, 2048), meta(8192, 1000))),
    "a function in float32": (torch.erfinv, (meta(4096, 8192),)),
    "a Bessel function": (torch.i0, (meta(4096, 8192, dtype=BF16),)),
    "one hot": (lambda i: F.one_hot(i, 32), (meta(8192, dtype=torch.int64),)),
    "many rows scanned": (lambda x: x.cumsum(-1), (meta(100_000, 64),)),
}


@pytest.fixture(autouse=True)
def multiplies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says whether the processor multiplies bfloat16: it does not, unless a test has it so."""

    def said(does: bool) -> None:
        monkeypatch.setattr("terrazzo.rules.torch_to_tensor.on_a_processor.multiplies_bfloat16", lambda: does)

    said(False)
    return said


@pytest.mark.parametrize("name", SLOWER)
def test_what_is_slower_is_called(name: str) -> None:
    fn, args, op = SLOWER[name]
    assert [c.split(".")[1] for c in calls(fn, *args)] == [op]
    assert calls(fn, *args, libraries="never") == []
    assert calls(fn, *args, target="cpu") == []


@pytest.mark.parametrize("name", OURS)
def test_what_is_not_slower_is_ours(name: str) -> None:
    fn, args = OURS[name]
    assert calls(fn, *args) == []


@pytest.mark.parametrize("name", ["tinyllama", "qwen2.5-7b", "llama-3-8b"])
def test_decoder_layers_in_bf16_call_nothing(name: str) -> None:
    (model,) = (m for m in models() if m.name.startswith(name))
    program = traced(*model.make("bf16"), training=False)
    (lowered,) = (p for _, p, _ in stages(program, Options(target="sm_90a"), Log(), ("torch_to_tensor",)))
    assert opaque(lowered) == []


def test_the_choice_is_told_with_both_prices() -> None:
    fn, args, _ = SLOWER["many tensors side by side"]
    done = lowering(capture(fn, args).program, Options(target="sm_90a"))
    (event,) = (e for e in done.log.events if e.rule == "library")
    assert event.fired
    told = r"aten.cat.default: ours [\d.]+ us by the model, the library's 55.4 us"
    assert re.fullmatch(told, event.reason)
    (call,) = done.loop.steps
    assert isinstance(call, l.Call)
    assert price(call, GPUS["sm_90a"]) == pytest.approx(55_429, rel=1e-3)


# Microseconds on an H200 (20 and 21 November 2026).
MEASURED = {
    "cuDNN 3x3": (OURS["3x3"], 27.1),
    "cuDNN 1x1": ((conv, (meta(32, 256, 56, 56, dtype=BF16), meta(64, 256, 1, 1, dtype=BF16))), 22.8),
    "cuDNN 3x3 of few pixels": (
        (conv, (meta(32, 512, 7, 7, dtype=BF16, last=True), meta(512, 512, 3, 3, dtype=BF16, last=True))),
        20.1,
    ),
    "cuDNN 7x7": (
        (
            lambda x, w: F.conv2d(x, w, stride=2, padding=3),
            (meta(32, 3, 224, 224, dtype=BF16, last=True), meta(64, 3, 7, 7, dtype=BF16, last=True)),
        ),
        225.0,
    ),
    # Channels first (24 November 2026).
    "cuDNN 7x7 and a bias": (
        (
            lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=3),
            (meta(32, 3, 224, 224, dtype=BF16), meta(64, 3, 7, 7, dtype=BF16), meta(64, dtype=BF16)),
        ),
        395.8,
    ),
    "cuDNN 3x3, turned": ((conv, (meta(16, 64, 96, 96, dtype=BF16), meta(128, 64, 3, 3, dtype=BF16))), 98.4),
    "cuDNN 3x3, apart": (
        (
            lambda x, w: F.conv2d(x, w, padding=3, dilation=3),
            (meta(8, 64, 128, 128, dtype=BF16), meta(64, 64, 3, 3, dtype=BF16)),
        ),
        60.8,
    ),
    "cuDNN in one dimension": (
        (
            lambda x, w: F.conv1d(x, w, stride=3, dilation=4),
            (meta(64, 64, 32768, dtype=BF16), meta(128, 64, 3, dtype=BF16)),
        ),
        507.6,
    ),
    "cuDNN transposed": (OURS["transposed, in 16 bits"], 96.3),
    "scanned rows": ((lambda x: x.cumsum(-1), (meta(4096, 4096),)), 179.3),
    "scanned long rows": ((lambda x: x.cumsum(-1), (meta(256, 65536, dtype=BF16),)), 202.7),
    "a scanned row": ((lambda x: x.cumsum(-1), (meta(1 << 24, dtype=BF16),)), 75.9),
    "scanned columns": ((lambda x: x.cumprod(1), (meta(64, 512, 512),)), 219.4),
    "log-sum-exp of rows": ((lambda x: x.logcumsumexp(-1), (meta(4096, 4096),)), 280.5),
    "scatter_add": (
        (
            lambda x, i, y: x.scatter_add(0, i, y),
            (meta(4096, 4096), meta(4096, 4096, dtype=torch.int64), meta(4096, 4096)),
        ),
        258.5,
    ),
    "scatter of few": (OURS["few of many rows written"], 63.4),
    "cat": (SLOWER["many tensors side by side"][:2], 54.6),
    "masked_scatter": (OURS["what a mask takes"], 296.3),
    "index_add": (
        (lambda x, i, y: x.index_add(-1, i, y), (meta(5120, 5120), meta(5120, dtype=torch.int64), meta(5120, 5120))),
        442.6,
    ),
    "cuBLAS 512 x 3584 x 3584": ((torch.mm, (meta(512, 3584), meta(3584, 3584))), 273.9),
    "cuBLAS 1024 x 1024 x 1024": ((torch.mm, (meta(1024, 1024), meta(1024, 1024))), 62.4),
    "cuBLAS 32 x 18944 x 3584": ((torch.mm, (meta(32, 3584), meta(3584, 18944))), 163.9),
    "cuBLAS 4096 x 4096 x 4096": ((torch.mm, (meta(4096, 4096), meta(4096, 4096))), 2750.9),
}


@pytest.mark.parametrize("name", MEASURED)
def test_what_a_library_reaches_is_what_was_measured(name: str) -> None:
    (fn, args), measured = MEASURED[name]
    (op,) = capture(fn, args).program.results
    assert price(op, GPUS["sm_90a"]) / 1e3 == pytest.approx(measured, rel=0.2)


# Microseconds on an H100 (27 November 2026), without TF32 and with it.
IN_FLOAT32 = {
    (32, 256, 14): (253.1, 48.2),
    (32, 64, 56): (255.6, 90.2),
    (4, 320, 64): (1015.6, 162.4),
    (8, 256, 64): (1305.4, 211.6),
}


@pytest.mark.parametrize("shape", IN_FLOAT32)
def test_a_convolution_in_float32_is_priced_as_cudnn_is_told_to_compute_it(shape: tuple[int, int, int]) -> None:
    n, c, side = shape
    (op,) = capture(conv, (meta(n, c, side, side), meta(c, c, 3, 3))).program.results
    found = [price(op, GPUS["sm_90a"], tf32) / 1e3 for tf32 in (False, True)]
    assert found == pytest.approx(IN_FLOAT32[shape], rel=0.25)


def test_a_convolution_in_float32_is_ours_where_tf32_will_do_too() -> None:
    """Tensor cores multiply once then, as a library's do."""
    program = capture(conv, (meta(4, 640, 32, 32), meta(640, 640, 3, 3))).program
    for tf32 in (False, True):
        steps = lowering(program, Options(target="sm_90a", tf32=tf32)).loop.steps
        assert not any(s.name == "aten.convolution.default" for s in steps)
        assert any(b.type.dtype.name == "f16" for s in steps for b in s.writes) == tf32


IN_SPACE = {  # of the image, of the weights, the stride, and microseconds with images turned
    "forward": ((32, 64, 32, 32, 32), (32, 64, 5, 5, 5), 2, 479),
    "few channels": ((8, 128, 26, 26, 26), (3, 128, 5, 5, 5), 1, 519),
}


@pytest.mark.parametrize("name", IN_SPACE)
def test_a_convolution_in_three_dimensions_is_slow(name: str) -> None:
    image, weights, stride, took = IN_SPACE[name]
    args = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in (image, weights)]
    (op,) = capture(lambda x, w: F.conv3d(x, w, stride=stride, padding=1), tuple(args)).program.results
    assert price(op, GPUS["sm_90a"]) / 1e3 == pytest.approx(took, rel=0.3)


def test_a_gradient_in_16_bits_has_both_prices_whatever_it_is_made_of() -> None:
    """That of a loss in float32 was ours, unasked: weights of 3 to 128 channels under 125 taps."""
    x, w = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((8, 3, 24, 24, 24), (3, 128, 5, 5, 5)))

    def gradient(x: Any, w: Any) -> Any:
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            loss = (F.conv_transpose3d(x, w, padding=1).float() ** 2 * 0.5).mean()
            return torch.autograd.grad(loss, w)

    program = capture(gradient, (x, w)).program
    done = lowering(program, Options(target="sm_90a"))
    assert any(e.rule == "library" and e.subject == "convolution_backward" for e in done.log.events)


def test_every_record_says_where_it_is_from() -> None:
    assert all(r.source and 0 < r.memory <= 1 and 0 < r.arithmetic <= 1 for r in library.REACH.values())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every op that may be called is, on the processor too."""
    chosen = Libraries(GPUS["sm_90a"], lambda op, enough: (1e12, ""))
    monkeypatch.setattr(pipelines, "libraries", lambda o, rough: chosen if o.libraries == "auto" else None)
    yield


def net(x: Any, w: Any, b: Any) -> Any:
    y = F.relu(F.conv2d(x, w, b, padding=1))
    u = F.max_pool2d(F.relu(F.conv2d(y, w, padding=1) + y), 2)
    m = u.flatten(2)
    a = m @ m.transpose(1, 2)
    return u, a.cumsum(-1), a.transpose(1, 2) @ m[:, :, 1:9], F.conv_transpose2d(u, w, stride=2)


@pytest.mark.parametrize("last", [False, True])
def test_results_are_eagers_own(forced: None, cache: Path, last: bool) -> None:
    """Bit for bit, and in the same memory format; from the cache too, and again and again."""
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 8, 8, 8), torch.randn(8, 8, 3, 3), torch.randn(8)
    if last:
        x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
    wanted = net(x, w, b)
    for _ in range(2):
        compiled = terrazzo.compile(net, x, w, b, options={"cache_dir": cache})
        for _ in range(2):
            for found, eager in zip(compiled(x, w, b), wanted, strict=True):
                assert found.stride() == eager.stride()
                assert torch.equal(found, eager)
    assert {f.op.split(".")[1] for f in compiled.compiled.fallbacks if f.chosen} == {"convolution", "bmm", "cumsum"}


def test_views_are_passed_and_nothing_is_copied(forced: None, cache: Path) -> None:
    x, w = torch.randn(6, 8, 4), torch.randn(6, 5, 4)
    compiled = terrazzo.compile(lambda x, w: x[:, 1:7] @ w.transpose(1, 2), x, w, options={"cache_dir": cache})
    program = compiled.compiled.program
    (step,) = program.steps
    assert step.args == (
        l.View(program.inputs[0], (6, 6, 4), (32, 4, 1), 4),
        l.View(program.inputs[1], (6, 4, 5), (20, 1, 4), 0),
    )
    assert parse(show(program)) == program
    plan = compiled.compiled.plan
    assert plan.arena == 0
    assert Plan.from_json(plan.to_json()).steps[0].args == plan.steps[0].args
    torch.testing.assert_close(compiled(x, w), x[:, 1:7] @ w.transpose(1, 2))


def test_training_is_eagers_own(forced: None, cache: Path) -> None:
    def step(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
        ).to(memory_format=torch.channels_last)
        x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
        call = torch.compile(model, backend="terrazzo", options={"cache_dir": cache}) if compiled else model
        y = call(x)
        y.square().sum().backward()
        return [y, *(p.grad for p in model.parameters())]

    torch._dynamo.reset()
    ours = step(True)
    for found, eager in zip(ours, step(False), strict=True):
        torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-4)
        assert found.stride() == eager.stride()


def test_results_of_calls_are_given_back_when_nothing_needs_them(
    forced: None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cpu, "hands_on", True)  # else they lie where they are told to

    def chain(x: Any) -> Any:
        for _ in range(6):
            x = x @ x
        return x

    x = torch.randn(4, 4) / 4
    compiled = terrazzo.compile(chain, x, options={"cache_dir": cache})
    alive = []

    class Watched(dict[int, Any]):
        def update(self, *a: Any, **k: Any) -> None:
            super().update(*a, **k)
            alive.append(len(self))

    run = compiled.compiled
    run._call, given = lambda tensors, changed, call=run._call: call(Watched(tensors), changed), x  # type: ignore[method-assign]
    torch.testing.assert_close(compiled(given), chain(x))
    assert max(alive) <= 3  # what is read, what is written, and the input


EXAMPLE = """
@loop
def f(x: f32[3, 2], y: f32[3, 4]):
    with kernel('t', t=f32[2, 3]):
        for a0 in free(2):
            for a1 in free(3):
                in0 = x[a1, a0]
                t[a0, a1] = in0
    z, = call('aten.{}', t{}, _types=(f32[{}],))
    return (z,)
"""


def test_ops_that_may_rely_on_their_strides_get_copies() -> None:
    mm, neg = parse(EXAMPLE.format("mm.default", ", y", "2, 4")), parse(EXAMPLE.format("neg.default", "", "2, 3"))
    assert show(pass_views(mm, Log())).count("view(x, [2, 3], [1, 2], 0)") == 1
    assert len(pass_views(mm, Log()).steps) == 1
    assert pass_views(neg, Log()) is neg


AMONG_OTHERS = """
@loop
def f(x: f32[3, 2], y: f32[3, 4]):
    with kernel('s', s=f32[2], t=f32[2, 3]):
        for a0 in free(2):
            for r0 in reduce(3):
                in0 = x[r0, a0]
                acc0 <- sum(in0)
            s[a0] = acc0
            for a1 in free(3):
                in1 = x[a1, a0]
                t[a0, a1] = in1
    z, = call('aten.mm.default', t, y, _types=(f32[2, 4],))
    return (s, z)
"""


def test_a_copy_that_a_kernel_stores_beside_others_is_a_view() -> None:
    """As a gradient is turned where a bias' gradient adds it up: each layer of a net copied it, and kept the copies."""
    program = parse(AMONG_OTHERS)
    kernel, call = (found := pass_views(program, Log())).steps
    assert [b.name for b in kernel.writes] == ["s"] and len(kernel.axes) == 1
    assert isinstance(call, l.Call) and show(found).count("view(x, [2, 3], [1, 2], 0)") == 1
    given = {b.name: np.random.default_rng(0).random(b.type.static_shape, np.float32) for b in program.inputs}
    both = (interpreter.run(x, given, call=call_numpy) for x in (found, program))
    for ours, right in zip(*both, strict=True):
        np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize(
    ("view", "why"),
    [
        ("view(x, [2, 3], [1, 2], 1)", "view: it leaves the memory of x"),
        ("view(x, [2, 3], [1], 0)", "are no shape, strides and offset"),
        ("view(x, [2, 3], [1, -2], 0)", "are no shape, strides and offset"),
    ],
)
def test_a_view_stays_in_its_buffer(view: str, why: str) -> None:
    text = EXAMPLE.format("mm.default", ", y", "2, 4").replace(" t, y", f" {view}, y")
    with pytest.raises(terrazzo.errors.UserError, match=why):
        parse(text)


def test_operators_that_are_special_methods_are_known() -> None:
    """x >> y of tensors is aten.__rshift__ in some versions of PyTorch, and is known where a library is a choice."""

    def shifted(x: Any, y: Any) -> Any:
        return torch.ops.aten.__rshift__.Tensor(x, y).cumsum(0)

    program = capture(shifted, (torch.arange(8), torch.arange(8) % 3)).program
    assert "aten.__rshift__.Tensor" in show(program) and parse(show(program)) == program
    assert calls(shifted, torch.arange(8), torch.arange(8) % 3) == []


def test_ops_that_no_rule_lowers_are_given_what_eager_gives_them() -> None:
    """A transposed weight of experts, and what modes along the first axis are of, are views: nothing is copied."""

    def fn(x: Any, w: Any, ends: Any, y: Any) -> Any:
        return torch._grouped_mm(x, w.transpose(-2, -1), offs=ends), torch.mode(y.t(), -1).values

    args = meta(512, 256, dtype=BF16), meta(8, 1024, 256, dtype=BF16), meta(8, dtype=torch.int32), meta(64, 32)
    steps = stages(capture(fn, args).program, Options(target="sm_90a"), Log())[-1][1].steps
    given = {s.name: [a for a in s.args if isinstance(a, l.View)] for s in steps if isinstance(s, l.Call)}
    assert len(steps) == 2 and given.keys() == {"aten._grouped_mm.default", "aten.mode.default"}
    assert given["aten._grouped_mm.default"][0].strides == (1024 * 256, 1, 256)
    assert given["aten.mode.default"][0].strides == (1, 32)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, BF16])
def test_scans_of_one_row_are_ours_whatever_their_type(dtype: Any) -> None:
    """In pieces: a row of 4 M float32 took 27 us, and PyTorch 42 (H200)."""
    assert calls(lambda x: x.cumsum(-1), meta(1, 1 << 24, dtype=dtype)) == []


@pytest.mark.parametrize("target", ["sm_75", "sm_90a"])
@pytest.mark.parametrize("op", [torch.cat, torch.stack])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, BF16])
def test_tensors_one_beside_the_other_are_priced_as_their_kernels_are(target: str, op: Any, dtype: Any) -> None:
    gpu = GPUS[target]
    for count, shape, dim in ((2, (7,), 0), (5, (200, 39, 8), 1), (ONE, (3, 16, 8), 2), (SEVERAL, (8, 16), 0)):
        (node,) = (n for n in topological(side_by_side(op, count, shape, dim, dtype).results) if isinstance(n, Aten))
        found, exact = beside(node, gpu)
        ours, _ = pipelines._alone(target, "auto", (False,), node)
        assert exact == (count <= ONE)
        assert ours == pytest.approx(found, rel=1e-9) if exact else ours >= found > 2 * gpu.launch


def side_by_side(op: Any, count: int, shape: tuple[int, ...], dim: int, dtype: Any) -> Any:
    given = [meta(*shape, dtype=dtype) for _ in range(count)]
    return capture(lambda *x: op(x, dim), given).program


def test_many_tensors_one_beside_the_other_are_not_lowered_to_know_that_a_library_is_faster() -> None:
    def asked(op: Aten, enough: float) -> tuple[float, str]:
        raise AssertionError(op)

    for count in (24, 200):
        log = Log()
        program = side_by_side(torch.cat, count, (512, 128), 1, BF16)
        assert len(Libraries(GPUS["sm_90a"], asked).chosen(program, log)) == 1
        assert ("by the model at least" in log.events[0].reason) == (count > ONE)


def test_other_tensors_one_beside_the_other_are_lowered_to_know_their_price() -> None:
    x, none, columns = meta(8, 16), meta(0), meta(16, 8).t()
    for given, fn in (
        ((x,), lambda x: torch.cat((x, x))),
        ((x, none), lambda x, y: torch.cat((x, y))),
        ((x, columns), lambda x, y: torch.cat((x, y))),
    ):
        nodes = topological(capture(fn, given).program.results)
        (node,) = (n for n in nodes if isinstance(n, Aten))
        assert beside(node, GPUS["sm_90a"]) == (0.0, False)


@pytest.mark.parametrize(
    ("made", "shape", "called"),
    [
        (lambda: torch.nn.ConvTranspose2d(32, 32, 2, 2), (1, 32, 16, 32), True),
        (lambda: torch.nn.Conv2d(64, 64, 3, 2, 1), (1, 64, 24, 24), True),
        (lambda: torch.nn.Conv2d(64, 64, 3, padding=1), (1, 64, 8, 8), True),
        (lambda: torch.nn.Conv2d(64, 64, 1), (1, 64, 16, 16), False),
        (lambda: torch.nn.Conv2d(64, 64, 3, padding=1, groups=2), (1, 64, 8, 8), False),
        (lambda: torch.nn.ConvTranspose2d(4, 4, 2, 2), (1, 4, 8, 8), False),
        (lambda: torch.nn.Conv2d(32, 32, 3, 2, 1), (2, 32, 28, 28), True),
        (lambda: torch.nn.Conv2d(16, 32, 3, 2, 1), (2, 16, 28, 28), False),
        (lambda: torch.nn.Conv2d(64, 64, 5, padding=2, groups=64), (1, 64, 28, 28), True),
        (lambda: torch.nn.Conv2d(64, 64, 3, padding=1, groups=64), (2, 64, 56, 56), False),
        (lambda: torch.nn.Conv1d(64, 64, 31, padding=15, groups=64), (4, 64, 400), False),
    ],
)
def test_some_convolutions_are_called_on_a_processor(made: Any, shape: Any, called: bool, cache: Path) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(made(), torch.nn.ReLU()), torch.randn(shape)
    with torch.no_grad():
        compiled = terrazzo.compile(model, x, options={"cache_dir": cache})
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        assert [f.op for f in compiled.compiled.fallbacks if f.chosen] == ["aten.convolution.default"] * called
        never = terrazzo.compile(model, x, options={"cache_dir": cache, "libraries": "never"})
        assert not never.compiled.fallbacks


@pytest.mark.parametrize(("channels", "last", "called"), [(16, True, True), (16, False, False), (8, True, False)])
def test_convolutions_are_called_where_channels_are_last(channels: int, last: bool, called: bool, cache: Path) -> None:
    """A library's vectors lie along channels then, and ours would be read across memory; so would their results."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.BatchNorm2d(channels), torch.nn.Conv2d(channels, 32, 3, padding=1), torch.nn.ReLU()
    ).eval()
    x = torch.randn(2, channels, 24, 24).contiguous(
        memory_format=torch.channels_last if last else torch.contiguous_format
    )
    with torch.no_grad():
        compiled = terrazzo.compile(model, x, options={"cache_dir": cache})
        found = compiled(x)
        assert [f.op for f in compiled.compiled.fallbacks if f.chosen] == ["aten.convolution.default"] * called
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)
        assert found.stride() == model(x).stride()


@pytest.mark.parametrize(
    ("fn", "shapes", "called"),
    [
        (torch.nn.functional.linear, [(64, 512), (512, 512), (512,)], "addmm"),
        (torch.nn.functional.linear, [(8, 512), (512, 512), (512,)], None),
        (torch.nn.functional.linear, [(1, 4096), (4096, 4096), (4096,)], None),
        (torch.matmul, [(64, 64, 64), (64, 64, 64)], "bmm"),
        (torch.nn.functional.conv2d, [(1, 64, 48, 48), (64, 64, 1, 1), (64,)], "convolution"),
        (torch.nn.functional.conv2d, [(1, 64, 8, 8), (64, 64, 1, 1), (64,)], None),
    ],
)
def test_products_in_bfloat16_are_called_where_a_processor_multiplies_such(
    fn: Any, shapes: Any, called: str | None, multiplies: Any
) -> None:
    short, long = ([meta(*shape, dtype=kind) for shape in shapes] for kind in (BF16, torch.float32))
    assert calls(fn, *short, target="cpu") == []
    multiplies(True)
    assert calls(fn, *long, target="cpu") == []
    assert calls(fn, *short, target="cpu") == ([f"aten.{called}.default"] if called else [])
    assert calls(fn, *short, target="cpu", libraries="never") == []


@pytest.mark.parametrize(
    ("fn", "shapes", "called"),
    [
        (torch.nn.functional.linear, [(128, 512), (1024, 512), (1024,)], ["addmm"]),
        (torch.nn.functional.linear, [(64, 1024), (1024, 1024), (1024,)], []),
        (torch.matmul, [(256, 256), (256, 256)], []),
        (lambda x, y: x.mT @ y, [(2048, 64), (2048, 512)], ["mm"]),
        (torch.matmul, [(32, 128, 128), (32, 128, 128)], ["bmm"]),
        (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, [(8, 512, 64)] * 3, []),
        (lambda q, k, v: ((q @ k.mT).softmax(-1), (q @ k.mT).softmax(-1) @ v), [(8, 512, 64)] * 3, ["bmm", "bmm"]),
        (lambda x, w, v: (x @ w).relu() @ v, [(256, 512), (512, 1024), (1024, 512)], ["mm", "mm"]),
    ],
)
def test_large_products_in_float32_are_called_on_a_processor(fn: Any, shapes: Any, called: list[str]) -> None:
    """But those of scores that nobody else reads are one kernel, which keeps these."""
    given = [meta(*shape, dtype=torch.float32) for shape in shapes]
    assert calls(fn, *given, target="cpu") == [f"aten.{name}.default" for name in called]
    assert calls(fn, *given, target="cpu", libraries="never") == []


@pytest.mark.parametrize(("side", "called"), [(6, True), (7, False)])
def test_largest_elements_of_windows_that_differ_are_called_on_a_processor(side: int, called: bool) -> None:
    x = meta(4, 64, 28, 28, dtype=torch.float32)
    found = calls(lambda x: F.adaptive_max_pool2d(x, side), x, target="cpu")
    assert found == ["aten.adaptive_max_pool2d.default"] * called


@pytest.mark.parametrize("way", ["bilinear", "bicubic"])
def test_images_in_bfloat16_are_resampled_by_a_call_on_a_processor(way: str, cache: Path) -> None:
    """In float32 ours are as fast, but for gradients of cubic weights, which are sums of 16 windows that differ."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, 30, 30)
    for kind, called in ((BF16, True), (torch.float32, False)):
        found = calls(lambda x: F.interpolate(x, scale_factor=2.0, mode=way), x.to(kind), target="cpu")
        assert found == [f"aten.upsample_{way}2d.default"] * called
    grad = torch.randn(2, 16, 60, 60)
    back = getattr(torch.ops.aten, f"upsample_{way}2d_backward").default

    def gradient(grad: Any) -> Any:
        return back(grad, [60, 60], [2, 16, 30, 30], False, 2.0, 2.0)

    compiled = terrazzo.compile(gradient, grad, options={"cache_dir": cache})
    torch.testing.assert_close(compiled(grad), gradient(grad), rtol=1e-4, atol=1e-5)
    assert len(compiled.compiled.fallbacks) == (way == "bicubic")


def test_depthwise_convolutions_are_called_where_channels_are_last(multiplies: Any, cache: Path) -> None:
    """Ours have vectors along rows of an image, and those of a library along channels."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Conv2d(96, 96, 3, padding=1, groups=96), torch.nn.ReLU())
    rows = torch.randn(1, 96, 40, 40)
    last = rows.to(memory_format=torch.channels_last)
    with torch.no_grad():
        for x, called in ((rows, False), (last, True)):
            compiled = terrazzo.compile(model, x, options={"cache_dir": cache})
            assert compiled(x).stride() == model(x).stride()
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
            assert [f.op for f in compiled.compiled.fallbacks if f.chosen] == ["aten.convolution.default"] * called

    def depthwise(x: Any, w: Any) -> Any:
        return torch.nn.functional.conv2d(x, w, padding=1, groups=96)

    narrow = [(x.to(BF16), torch.randn(96, 1, 3, 3, dtype=BF16)) for x in (rows, last)]
    assert [calls(depthwise, *given, target="cpu") for given in narrow] == [[], []]
    multiplies(True)
    assert [calls(depthwise, *given, target="cpu") for given in narrow] == [[], ["aten.convolution.default"]]


def test_a_processor_says_what_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, does in (("fpu avx512f avx512_bf16", True), ("amx_bf16 avx512f", True), ("avx2 avx512f bf16", False)):
        monkeypatch.setattr(processor, "told", lambda flags=flags: {"flags": flags})
        assert processor.multiplies_bfloat16() == does
    monkeypatch.setattr(processor, "told", dict)
    assert not processor.multiplies_bfloat16()


@pytest.mark.parametrize(("rows", "written", "called"), [(600, 300, True), (600, 4, False), (60, 40, False)])
def test_what_is_written_where_data_says_is_a_call_where_many_indices_are_compared(
    rows: int, written: int, called: bool, cache: Path
) -> None:
    x, index, new = torch.randn(rows, 8), torch.randperm(rows)[:written], torch.randn(written, 8)
    fn = lambda x, i, new: x.index_put((i,), new)  # noqa: E731
    compiled = terrazzo.compile(fn, x, index, new, options={"cache_dir": cache})
    assert torch.equal(compiled(x, index, new), fn(x, index, new))
    assert [f.op for f in compiled.compiled.fallbacks if f.chosen] == ["aten.index_put.default"] * called
    masked = lambda x, chosen: x.index_put((chosen,), x.new_zeros(()))  # noqa: E731
    assert not terrazzo.compile(masked, x, x > 0, options={"cache_dir": cache}).compiled.fallbacks


COPIED: dict[str, Callable[..., Any]] = {
    "index_put": lambda x, i, y: x.index_put((i,), y),
    "index_copy": lambda x, i, y: x.index_copy(0, i, y),
    "index_reduce": lambda x, i, y: x.index_reduce(0, i, y, "amax"),
}


@pytest.mark.parametrize(
    ("name", "tokens"), [(name, n) for name in COPIED for n in (16384, 4) if (name, n) != ("index_reduce", 4)]
)
def test_rows_that_go_where_data_says_are_a_call_where_many_are_compared(name: str, tokens: int) -> None:
    """Such as tokens on their way to experts."""
    given, called = (meta(20481, 1024), meta(tokens, dtype=torch.int64), meta(tokens, 1024)), tokens > 4
    for target in ("sm_90a", "cpu"):
        assert calls(COPIED[name], *given, target=target) == [f"aten.{name}.default"] * called


@pytest.mark.parametrize(("rows", "heads", "pairs", "called"), [(169, 3, 2401, False), (732, 12, 38809, True)])
def test_gradients_of_small_tables_are_ours_on_a_gpu(rows: int, heads: int, pairs: int, called: bool) -> None:
    """Such as of biases by relative position: PyTorch would sort the places first."""
    given = torch.zeros(rows, heads).bfloat16(), torch.zeros(pairs, dtype=torch.int64)
    added = lambda x, i: x.index_put((i,), x.new_ones(len(i), heads), accumulate=True)  # noqa: E731
    widened = lambda x, i: x.float().index_put((i,), x.new_ones(len(i), heads).float(), accumulate=True)  # noqa: E731
    summed = lambda x, i: torch.ops.aten.embedding_dense_backward(x[:1].expand(len(i), heads), i, rows, -1, False)  # noqa: E731
    for fn, name in ((added, "index_put"), (widened, "index_add"), (summed, "embedding_dense_backward")):
        assert calls(fn, *given) == [f"aten.{name}.default"] * called
        if not called:
            on_a_processor = name.replace("index_add", "index_put")
            assert calls(fn, *given, target="cpu") == [f"aten.{on_a_processor}.default"]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_good_way_is_enough_to_know_that_ours_is_no_slower(dtype: Any) -> None:
    args = meta(2048, 1024, dtype=dtype), meta(1024, 1024, dtype=dtype)
    (node,) = (n for n in topological(capture(torch.mm, args).program.results) if isinstance(n, Aten))
    best, told = pipelines._alone("sm_90a", "auto", (False,), node, 0.0)
    assert told == ""
    assert pipelines._alone("sm_90a", "auto", (False,), node, best / 2) == (best, "")  # which no way takes
    found, told = pipelines._alone("sm_90a", "auto", (False,), node, 4 * best)
    assert best <= found < 4 * best and told == " at most"
