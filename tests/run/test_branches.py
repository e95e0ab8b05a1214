"""Steps side by side: whatever order a GPU takes them in, each finds what it reads, and nobody writes over it."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import terrazzo
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.types import Type, f32
from terrazzo.options import Options
from terrazzo.run.arena import allocate
from terrazzo.run.branches import ROOM, Ahead, Place, side_by_side
from terrazzo.run.frame import SINGLY
from terrazzo.run.launch import Graph
from terrazzo.run.misfit import misfit
from terrazzo.run.own import layout
from terrazzo.run.plan import Entry, Plan, make, spans
from terrazzo.run.streams import Streams

often = settings(max_examples=200, deadline=None, derandomize=True)


def step(name: str, *reads: l.Buffer, size: int = 4) -> l.Kernel:
    """A kernel that adds up what it reads."""
    a = Var("a0", size)
    value: Any = l.Literal(1.0, f32)
    for b in reads:
        value = l.apply("add", value, l.Load(b, (a % b.type.shape[0],)))
    return l.Kernel(name, (a,), (l.Store(l.Buffer(name, Type(f32, (size,))), (a,), value),))


def program(reads: Sequence[Sequence[int]], results: Sequence[int], size: int = 4) -> l.Program:
    """Kernels of which each reads what some before it wrote."""
    x = l.Buffer("x", Type(f32, (4,)))
    steps: list[l.Kernel] = []
    for k, mine in enumerate(reads):
        steps.append(step(f"t{k}", *(steps[n].writes[0] for n in mine), *([] if mine else [x]), size=size))
    return l.Program("f", (x,), tuple(steps), tuple(steps[n].writes[0] for n in results))


@st.composite
def programs(draw: Any) -> l.Program:
    count = draw(st.integers(2, 24))
    near = st.integers(1, 6)
    reads = [sorted({max(0, k - d) for d in draw(st.lists(near, max_size=2))} - {k}) for k in range(count)]
    return program(reads, [count - 1])


def before(places: Sequence[Place]) -> list[set[int]]:
    """What is through when each step begins, found step by step: a branch in order, and what is waited for."""
    found: list[set[int]] = []
    last: dict[int, int] = {}
    for n, p in enumerate(places):
        direct = {*p.after, *([last[p.branch]] if p.branch in last else [])}
        found.append(direct.union(*(found[d] for d in direct)))
        last[p.branch] = n
    return found


@often
@given(programs(), st.integers(0, 3))
def test_each_comes_after_what_it_needs_and_shares_no_memory_with_what_runs_beside(made: l.Program, every: int) -> None:
    wide = {s.name for n, s in enumerate(made.steps) if every and n % (3 * every) == 0}
    moved, places = side_by_side(made, lambda s: s.name not in wide)
    assert sorted(s.name for s in moved.steps) == sorted(s.name for s in made.steps)
    through = before(places)
    ahead = Ahead(places)
    writer = {b: n for n, s in enumerate(moved.steps) for b in s.writes}
    for n, s in enumerate(moved.steps):
        assert all(writer[b] in through[n] for b in s.reads if b in writer)
        assert {m for m in range(n) if ahead([m], n)} == through[n]
        assert s.name not in wide or (places[n].branch == 0 and through[n] == set(range(n)))
        for d in places[n].after:  # no wait is for nothing
            fewer = replace(places[n], after=tuple(x for x in places[n].after if x != d))
            assert d not in before([*places[:n], fewer])[n]
    temporaries = [b for s in moved.steps for b in s.writes if b not in moved.results]
    offsets, _ = allocate(moved, temporaries, places)
    users = {b: [n for n, s in enumerate(moved.steps) if b in (*s.reads, *s.writes)] for b in temporaries}
    for a, b in itertools.combinations(temporaries, 2):
        if offsets[a] == offsets[b]:
            first, second = sorted((users[a], users[b]))
            assert all(n in through[second[0]] for n in first)


def chains(count: int, length: int) -> list[list[int]]:
    """Chains of steps, one after the other, and a step that reads the ends of all."""
    reads = [[c * length + k - 1] if k else [] for c in range(count) for k in range(length)]
    return [*reads, [c * length + length - 1 for c in range(count)]]


def test_chains_run_side_by_side() -> None:
    _, places = side_by_side(program(chains(2, 10), [20]), lambda s: True)
    assert [p.branch for p in places].count(1) == 10 and places[-1] == Place(0, (19,))
    _, places = side_by_side(program(chains(1, 10), [10]), lambda s: True)
    assert places == [Place()] * 11
    _, places = side_by_side(program(chains(2, 10), [20]), lambda s: False)
    assert places == [Place()] * 21


def test_large_steps_come_before_chains_that_they_need_nothing_of() -> None:
    """Each direction of a net begins with a product of all its inputs."""
    moved, places = side_by_side(program(chains(2, 10), [20]), lambda s: s.name not in ("t0", "t10"))
    assert [s.name for s in moved.steps[:2]] == ["t0", "t10"]
    assert [p.branch for p in places].count(1) == 9
    needed = [[], [0], [1], [2], [2], [4]]  # t3 is large, and needs what is in the run
    moved, places = side_by_side(program(needed, [5]), lambda s: s.name != "t3")
    assert [s.name for s in moved.steps] == [f"t{n}" for n in range(6)]


def test_what_nothing_waits_for_does_not_hold_up_a_chain() -> None:
    """Gradients by weights beside the steps back in time: those end no later than alone, by a crossing."""
    steps = 12
    reads = [[2 * (k - 1)] if k else [] for k in range(steps)]
    both = [x for k, mine in enumerate(reads) for x in (mine, [2 * k])]
    moved, places = side_by_side(program(both, [2 * steps - 1]), lambda s: True)
    chain = [p.branch for s, p in zip(moved.steps, places, strict=True) if int(s.name[1:]) % 2 == 0]
    assert set(chain) == {0}
    assert sum(p.branch == 0 for p in places) <= steps + 1


class Stream:
    """A queue that notes what is through when its next work begins."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.done = number, {-1} if number == 0 else set[int]()

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def record_event(self) -> set[int]:
        return set(self.done)

    def wait_event(self, event: set[int]) -> None:
        self.done |= event


class Machine:
    def __init__(self) -> None:
        self.streams = [Stream(0)]

    def stream(self) -> Stream:
        return self.streams[0]

    def fork(self) -> Stream:
        self.streams.append(Stream(len(self.streams)))
        return self.streams[-1]


@often
@given(programs())
def test_streams_have_that_order(made: l.Program) -> None:
    _, places = side_by_side(made, lambda s: True)
    machine = Machine()
    streams = Streams(machine, places)
    count = len(places)
    for call in range(2):  # of which the second comes after the first
        streams.begin()
        for n in range(count):
            queue = machine.streams[streams.before(n)]
            first = all(p.branch != places[n].branch for p in places[:n])
            assert streams.alone(n) == (not places[n].after and not first)
            earlier = {-1} | {m for m in range(count) if call}
            assert queue.done == earlier | {m + call * count for m in before(places)[n]}
            queue.done.add(n + call * count)
            streams.after(n)
        streams.end()
    assert machine.streams[0].done == {-1, *range(2 * count)}


def test_ops_of_pytorch_stay_on_the_current_stream() -> None:
    made = program(chains(2, 10), [20])
    called = [15, 3, 11]
    steps = list(made.steps)
    for n in called:
        steps[n] = l.Call("aten.f.default", tuple(steps[n].reads), (), tuple(steps[n].writes))
    moved, places = side_by_side(replace(made, steps=tuple(steps)), lambda s: True)
    assert {p.branch for p in places} == {0, 1}
    assert all(p.branch == 0 for s, p in zip(moved.steps, places, strict=True) if isinstance(s, l.Call))


def planned(made: l.Program, processors: int = 132, blocks: int = 8) -> Plan:
    entries = {s: Entry("k" * 64, s.name, (*s.reads, *s.writes), (blocks, 32, 0, 0)) for s in made.steps}
    return make(made, entries, processors)


def test_plans_with_branches_read_back_and_wrong_ones_are_found() -> None:
    made = program(chains(2, 10), [20])
    plan = planned(made)
    assert plan.branches == 2 and Plan.from_json(plan.to_json()) == plan and misfit(plan, made) == ""
    ends = next(n for n, s in enumerate(plan.steps) if s.label == "t20")
    steps = tuple(replace(s, after=()) if n == ends else s for n, s in enumerate(plan.steps))
    assert "is used before it is there" in misfit(replace(plan, steps=steps), made)
    arena = [k for k, s in enumerate(plan.slots) if s.kind == "arena"]
    slots = tuple(replace(s, offset=0) if k in arena else s for k, s in enumerate(plan.slots))
    assert "share memory" in misfit(replace(plan, slots=slots), made)


def test_plans_with_branches_may_read_regions_of_what_is_there() -> None:
    made = program(chains(2, 10), [20])
    plan = planned(made)
    k = next(k for k, s in enumerate(plan.slots) if s.kind == "arena")
    read = max(n for n, s in enumerate(plan.steps) if k in s.args)
    region = replace(plan.slots[k], name="part", of=k, offset=0)
    args = tuple(len(plan.slots) if a == k else a for a in plan.steps[read].args)
    steps = (*plan.steps[:read], replace(plan.steps[read], args=args), *plan.steps[read + 1 :])
    plan = replace(plan, slots=(*plan.slots, region), steps=steps)
    assert plan.branches == 2 and Plan.from_json(plan.to_json()) == plan and misfit(plan, made) == ""


def test_where_there_are_no_branches() -> None:
    """On a CPU, where kernels are large, and where memory would grow by more than it is worth."""
    made = program(chains(2, 10), [20])
    assert planned(made, processors=0).branches == 1
    assert planned(made, blocks=500).branches == 2  # they write little
    large = program(chains(2, 10), [20], size=ROOM // 4 + 1)
    assert planned(large, blocks=500).branches == 1
    assert planned(large).branches == 1


def test_a_call_in_which_nothing_runs_side_by_side_takes_no_memory_for_that() -> None:
    plan = planned(program(chains(2, 10), [20], size=ROOM // 80))
    lies = layout(plan, apart=True)
    assert layout(plan, apart=False).size == plan.arena > 1.2 * lies.size
    first, last = spans(plan)
    ends = {k: offset + plan.slots[k].bytes for k, offset in lies.offsets.items()}
    for j, k in itertools.combinations(ends, 2):
        together = first[j] <= last[k] and first[k] <= last[j]
        assert not together or ends[j] <= lies.offsets[k] or ends[k] <= lies.offsets[j]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_both_directions_of_a_net_on_a_gpu(mode: str, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)
    net = torch.nn.GRU(64, 64, 1, bidirectional=True, device="cuda").eval()
    sets = [torch.randn(12, 8, 64, device="cuda") for _ in range(3)]
    with torch.no_grad():
        options = replace(Options.from_mode(mode), cache_dir=tmp_path, fp32="exact")
        compiled = terrazzo.compile(net, sets[0], options=options)
        assert compiled.compiled.plan.branches > 1
        exact = copy.deepcopy(net).double()  # cuDNN's own takes TF32 for float32
        expected = [exact(x.double())[0].float() for x in sets]
        for _ in range(3):
            for x, y in zip(sets, expected, strict=True):
                torch.testing.assert_close(compiled(x)[0], y, rtol=1e-4, atol=1e-4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [compiled(x)[0] for x in sets]
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [None, True, False])
def test_kernels_become_graphs_after_a_few_calls(graph: bool | None, tmp_path: Path) -> None:
    """What is given, what is kept for the backward pass and what is given back lie elsewhere at each call."""
    import torch

    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (torch.nn.Linear(96, 96), torch.nn.LayerNorm(96), torch.nn.GELU())]
    net = torch.nn.Sequential(*layers).cuda()
    exact = copy.deepcopy(net).double()
    torch._dynamo.reset()
    ours = torch.compile(net, backend="terrazzo", options={"graph": graph, "cache_dir": tmp_path, "fp32": "exact"})
    kept = []
    for k in range(SINGLY + 4):
        x = torch.randn(40, 96, device="cuda", requires_grad=True)
        z = x.detach().double().requires_grad_()
        y = ours(x)
        y.square().sum().backward()
        exact(z).square().sum().backward()
        kept += [torch.empty(1000 * k, device="cuda"), y]
        torch.testing.assert_close(x.grad, z.grad.float(), rtol=1e-3, atol=1e-4)
        for p, q in zip(net.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad.float(), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(y, exact(z).float(), rtol=1e-4, atol=1e-4)
    assert all(torch.isfinite(y).all() for y in kept[1::2])
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_program_that_runs_as_graphs_is_captured_in_another_graph(tmp_path: Path) -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(64, 64, device="cuda"), torch.nn.Tanh()).eval()
    x = torch.randn(16, 64, device="cuda")
    options = replace(Options.from_mode("reduce-overhead"), cache_dir=tmp_path, fp32="exact")
    with torch.no_grad():
        compiled = terrazzo.compile(net, x, options=options)
        exact = copy.deepcopy(net).double()
        torch.testing.assert_close(compiled(x), exact(x.double()).float(), rtol=1e-4, atol=1e-4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled(x)
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, exact(x.double()).float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(compiled(x), y)


@pytest.mark.gpu
@pytest.mark.parametrize("branched", [False, True])
def test_a_captured_graph_outlives_the_program(branched: bool, tmp_path: Path) -> None:
    """Its temporaries are its own, and what was kept of frozen weights stays as long as these."""
    import torch

    if branched:
        net: Any = torch.nn.GRU(64, 64, 1, bidirectional=True, device="cuda").eval()
    else:
        wide = [m for _ in range(3) for m in (torch.nn.Linear(768, 3000), torch.nn.GELU(), torch.nn.Linear(3000, 768))]
        net = torch.nn.Sequential(*wide).cuda().eval()
    x = torch.randn(12, 8, 64, device="cuda") if branched else torch.randn(1024, 768, device="cuda")
    options = Options(cache_dir=tmp_path, fp32="split", libraries="never", freezing=True)
    with torch.no_grad():
        compiled = terrazzo.compile(net, x, options=options)
        compiled(x)
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        found = []
        for graph in graphs:
            with torch.cuda.graph(graph):
                y = compiled(x)
                found.append(y[0] if branched else y)
        del compiled
        gc.collect()
        torch.cuda.empty_cache()
        other = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(8)]
        exact = copy.deepcopy(net).double()(x.double())
        for k, graph in enumerate(graphs * 3):  # at the same time
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                graph.replay()
            if k % 2:
                torch.cuda.synchronize()
        for y in found:
            torch.testing.assert_close(y, (exact[0] if branched else exact).float(), rtol=1e-4, atol=1e-4)
        assert all(bool(t.isnan().all()) for t in other)


class Recorder:
    """A machine that only notes what a graph is made of."""

    def __init__(self) -> None:
        self.driver = pytest.importorskip("cuda.bindings.driver")
        self.nodes: list[list[int]] = []
        self.early: list[tuple[int, int]] = []

    def call(self, name: str, *args: Any) -> Any:
        if name == "cuGraphAddKernelNode":
            self.nodes.append(args[1])
            return len(self.nodes) - 1
        if name == "cuGraphAddDependencies":
            _, first, second, kinds, count = args
            assert {x.type for x in kinds} == {1} and len(kinds) == count
            self.early = list(zip(first, second, strict=True))
        return None


def test_kernels_of_a_graph_overlap_where_they_wait_for_one_branch() -> None:
    machine = Recorder()

    def launch(early: bool) -> Any:
        values = dict.fromkeys(("function", "blocks", "threads", "shared", "at"), 0)
        return SimpleNamespace(early=early, ready=lambda: None, addresses=b"", **values)

    launches = [launch(early) for early in (True, True, False, True, True)]
    places = [Place(), Place(), Place(), Place(1, (1,)), Place(0, (3,))]
    Graph(machine, launches, places, memoryview(b""))  # type: ignore[arg-type]
    assert machine.nodes == [[], [], [1], [1], [2, 3]] and machine.early == [(0, 1)]
