"""Two dumps of `worker.py` side by side: which kernels are the same, which changed, and which times did."""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Dump = Mapping[str, Any]

SLOWER = 1.03
"""A case that takes so many times as long as before is called slower."""
SHORT = 16
"""Lines of a diff that are shown where not all were asked for."""
FEW = 20
"""Kernels of a kind that are shown then."""
KINDS = ("changed", "appeared", "vanished")


@dataclass
class Pair:
    """A kernel before and after (None: it was or is not there), and where it stands: "case: kernel"."""

    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    places: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """One of `KINDS`, or "same"."""
        if self.before is None:
            return "appeared"
        if self.after is None:
            return "vanished"
        return "same" if self.before["key"] == self.after["key"] else "changed"

    def facts(self) -> dict[str, tuple[Any, Any]]:
        """What is known of it without running it, where that is not what it was: how it is launched, what the model
        says.
        """
        if not self.before or not self.after:
            return {}
        old, new = self.before["facts"], self.after["facts"]
        both = [name for name in old if name in new and None not in (old[name], new[name])]
        return {name: (old[name], new[name]) for name in both if old[name] != new[name]}

    def diff(self, text: str) -> list[str]:
        """A unified diff of a text: "schedule", "kernel" or "cuda"."""
        old, new = ((side or {}).get(text, "").splitlines() for side in (self.before, self.after))
        return list(difflib.unified_diff(old, new, f"{text} before", f"{text} after", lineterm="", n=2))


@dataclass(frozen=True)
class Comparison:
    """`pairs`: each pair of kernels once. `failures`: for a case that fails on either side, both (None: it compiles).
    `only`: cases that one side alone has.
    """

    pairs: list[Pair]
    failures: dict[str, tuple[Mapping[str, str] | None, Mapping[str, str] | None]]
    only: dict[str, list[str]]
    prelude: bool

    def count(self, kind: str) -> int:
        """How many different pairs are of a kind."""
        return sum(p.kind == kind for p in self.pairs)

    @property
    def broken(self) -> list[str]:
        """The cases that compiled before and do not now."""
        return [name for name, (before, after) in self.failures.items() if before is None and after is not None]

    @property
    def touched(self) -> list[str]:
        """The cases of which some kernel is not what it was."""
        places = [place for p in self.pairs if p.kind != "same" for place in p.places]
        return list(dict.fromkeys(place.split(" -> ")[0] for place in places))


def compare(before: Dump, after: Dump) -> Comparison:
    """Kernels of the same case are matched; equal pairs, in whichever cases, are one."""
    pairs: dict[tuple[str | None, str | None], Pair] = {}
    failures = {}
    both = [name for name in before["cases"] if name in after["cases"]]
    for case in both:
        old, new = before["cases"][case], after["cases"][case]
        if old["failed"] or new["failed"]:
            failures[case] = (old["failed"], new["failed"])
            continue
        for name, keys in _matched(old["kernels"], new["kernels"]):
            pair = pairs.get(keys)
            if pair is None:
                was, now = keys
                pair = pairs[keys] = Pair(
                    before["kernels"][was] if was else None, after["kernels"][now] if now else None
                )
            pair.places.append(f"{case} -> {name}")
    only = {
        "before": [name for name in before["cases"] if name not in after["cases"]],
        "after": [name for name in after["cases"] if name not in before["cases"]],
    }
    return Comparison(list(pairs.values()), failures, only, before["prelude"] != after["prelude"])


def _matched(old: Sequence[Any], new: Sequence[Any]) -> Iterator[tuple[str, tuple[str | None, str | None]]]:
    """Which kernel of a case became which, as (name, keys): those that are alike first, whatever their names; then
    those of one name; then, where as many are left on both sides, those at the same place in order.
    """
    was, now = [tuple(x) for x in old], [tuple(x) for x in new]
    for number in (1, 0):
        for a in list(was):
            if (b := next((b for b in now if b[number] == a[number]), None)) is not None:
                was.remove(a)
                now.remove(b)
                yield b[0], (a[1], b[1])
    if len(was) == len(now):
        yield from ((b[0], (a[1], b[1])) for a, b in zip(was, now, strict=True))
        return
    yield from ((name, (key, None)) for name, key in was)
    yield from ((name, (None, key)) for name, key in now)


# --- what is printed ---


def report(found: Comparison, everything: bool = False) -> Iterator[str]:
    """The lines that tell what changed; `everything` shows all of each diff, Kernel IR included."""
    kinds = ", ".join(f"{found.count(kind)} {kind}" for kind in ("same", *KINDS))
    yield f"{len(found.pairs)} different kernels: {kinds}"
    if priced := sum(p.kind == "same" and bool(p.facts()) for p in found.pairs):
        yield f"{priced} of those that are the same have another price"
    if found.prelude:
        yield "The prelude of all CUDA sources changed."
    for side, names in found.only.items():
        if names:
            yield f"{len(names)} cases are only there {side}: {_some(names)}"
    for case, (before, after) in found.failures.items():
        if everything or before != after:
            yield f"{case}: {_failure(before)} before, {_failure(after)} now"
    alike = sum(before == after for before, after in found.failures.values())
    if alike:
        yield f"{alike} cases fail as they did before"
    for kind in KINDS:
        pairs = [p for p in found.pairs if p.kind == kind]
        for pair in pairs if everything else pairs[:FEW]:
            yield ""
            yield from _pair(pair, everything)
        if len(pairs) > FEW and not everything:
            yield f"\n... {len(pairs) - FEW} more {kind} (-v)"


def _pair(pair: Pair, everything: bool) -> Iterator[str]:
    yield f"=== {pair.kind}: {_some(pair.places, 1000 if everything else 2)} ==="
    for name, (old, new) in pair.facts().items():
        yield f"    {name}: {old} before, {new} now"
    if pair.kind != "changed" and not everything:
        yield from (f"    {line}" for line in ((pair.before or pair.after or {})["schedule"]).splitlines())
        return
    for text in ("schedule", "kernel", "cuda") if everything else ("schedule", "cuda"):
        lines = pair.diff(text)
        shown = lines if everything else lines[:SHORT]
        yield from (f"    {line}" for line in shown)
        if len(shown) < len(lines):
            yield f"    ... {len(lines) - len(shown)} lines more (-v)"


def _some(names: Sequence[str], most: int = 3) -> str:
    more = len(names) - most
    return "; ".join(names[:most]) + (f"; and {more} more" if more > 0 else "")


def _failure(failed: Mapping[str, str] | None) -> str:
    return f"{failed['type']}: {failed['message']}" if failed else "compiles"


# --- times ---


def ratios(times: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """How many times as long as before a case takes, in the median of its openings, slowest first."""
    found = {case: statistics.median(t["ratios"]) for case, t in times.items() if "ratios" in t}
    return dict(sorted(found.items(), key=lambda x: -x[1]))


def geomean(values: Sequence[float]) -> float:
    """The geometric mean; 1 of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0


def timing(times: Mapping[str, Mapping[str, Any]], everything: bool = False) -> Iterator[str]:
    """The lines that tell which cases became slower, and the geometric mean of each suite."""
    found = ratios(times)
    slower = {case: r for case, r in found.items() if r > SLOWER}
    yield f"{len(found)} cases timed, {len(slower)} of them more than {SLOWER - 1:.0%} slower"
    for case, r in (found if everything else slower).items():
        took, own = times[case], times[case]["ratios"]
        openings = f" ({min(own):.3f} to {max(own):.3f} in {len(own)} openings)" if len(own) > 1 else ""
        yield f"  {r:6.3f}x  {took['before']:10.1f} us -> {took['after']:10.1f} us  {case}{openings}"
    for case, t in times.items():
        if "failed" in t:
            yield f"  not timed: {case}: {t['failed']}"
    for suite in dict.fromkeys(case.split(":")[0] for case in found):
        mean = geomean([r for case, r in found.items() if case.startswith(f"{suite}:")])
        yield f"  {suite}: {mean:.3f}x (geometric mean)"
    if found:
        yield f"  all: {geomean(list(found.values())):.3f}x (geometric mean; below 1 is faster)"
