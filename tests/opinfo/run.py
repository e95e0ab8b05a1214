"""`make opinfo`: the whole operator database, and the table in the docs.

Every sample by the Loop IR interpreter, and two per operator and dtype compiled, through torch.compile.

python -m tests.opinfo.run [--level tensor|loop|kernel|cpu|cuda|torch.compile] [-k NAME] [--most N]
                           [--shard K/N] [--json FILE] [--table FILE]
python -m tests.opinfo.run --join FILE... --table FILE
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def work(job: tuple[str, int, str, int | None]) -> list[dict[str, Any]]:
    """One operator, all dtypes, in a process of its own pool."""
    import torch

    from tests.opinfo.harness import DTYPES, judge, operators

    torch.set_num_threads(1)
    pattern, index, level, most = job
    op = operators(pattern)[index]
    supported = op.supported_dtypes("cpu")
    return [{"level": level, **asdict(judge(op, dtype, level, most))} for dtype in DTYPES if dtype in supported]


def main() -> int:
    """Run, print what is wrong and the counts, write what was asked for. The exit status says whether anything was
    wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--level", choices=("tensor", "loop", "kernel", "cpu", "cuda", "torch.compile"), help="only this one"
    )
    parser.add_argument("-k", default="", metavar="NAME")
    parser.add_argument("--most", type=int, default=None, help="samples per operator and dtype, with --level")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--shard", type=_shard, default=(0, 1), metavar="K/N", help="every Nth operator, from the Kth (1 to N)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="run nothing; read what --json wrote")
    options = parser.parse_args()
    levels = [(options.level, options.most)] if options.level else PLAN
    verdicts: list[dict[str, Any]] = []
    if options.join:
        found = [v for path in options.join for v in json.loads(path.read_text())]
        verdicts = list(
            {(v["level"], v["op"], v["dtype"]): v for v in found}.values()
        )  # what was judged again counts as it was last
    else:
        for level, most in levels:
            verdicts += judge_all(level, most, options)
    if options.json:
        options.json.write_text(json.dumps(verdicts, indent=1))
    if options.table:
        options.table.write_text(table(verdicts, options.table.read_text() if options.table.exists() else ""))
    bad = 0
    for level in dict.fromkeys(v["level"] for v in verdicts):
        mine = [v for v in verdicts if v["level"] == level]
        counts = Counter(v["verdict"] for v in mine)
        names = {v["op"] for v in mine}
        own = len(own_operators(mine))
        print(f"{level}: {own} of {len(names)} operators wholly by own code; by operator and dtype: {dict(counts)}")
        bad += counts["wrong"] + counts["crash"]
    return 1 if bad else 0


PLAN = [("loop", None), ("torch.compile", 2)]
"""The levels of a whole run, and how many samples of an operator and dtype each takes."""


def judge_all(level: str, most: int | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The verdicts of one level; what is wrong is printed as it comes."""
    from tests.opinfo.harness import operators

    first, step = options.shard
    jobs = [(options.k, k, level, most) for k in range(first, len(operators(options.k)), step)]
    verdicts: list[dict[str, Any]] = []
    # CUDA cannot be used in a process that was forked from one that has it.
    with ProcessPoolExecutor(options.jobs, get_context("spawn" if level == "cuda" else "fork")) as pool:
        for k, found in enumerate(pool.map(work, jobs)):
            verdicts += found
            for v in found:
                if v["verdict"] in ("wrong", "crash"):
                    print(f"{v['verdict']:6} {v['op']} {v['dtype']}: {v['reason']}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{level}: {k + 1}/{len(jobs)}", end="", file=sys.stderr)
    return verdicts


def _shard(text: str) -> tuple[int, int]:
    k, n = map(int, text.split("/"))
    if not 1 <= k <= n:
        raise ValueError
    return k - 1, n


def own_operators(verdicts: list[dict[str, Any]]) -> list[str]:
    """The operators that are own code in every dtype that was judged."""
    by_op: dict[str, set[str]] = {}
    for v in verdicts:
        by_op.setdefault(v["op"], set()).add(v["verdict"] if v["samples"] else "skipped")
    return sorted(op for op, found in by_op.items() if found == {"own"})


COLUMNS = {
    "loop": ("the Loop IR interpreter", "interpreted"),
    "torch.compile": ("`torch.compile`, compiled", "compiled"),
    "cuda": ("an H200", "on a GPU"),
}
"""The levels a page shows: what runs them, and the heads of their columns."""


def table(verdicts: list[dict[str, Any]], page: str = "") -> str:
    """The page of the docs. What was not run now is as `page`, an earlier one, has it."""
    levels = {level: [v for v in verdicts if v["level"] == level] for level in COLUMNS}
    lines = [
        "# Operators",
        "",
        "PyTorch's operator database, in fp32, fp16, bf16, int64 and bool where defined. Written by `make opinfo`.",
        "",
        "| run by | samples | operators wholly by own code | own | fallback | random | not supported | wrong |",
        "|" + "---|" * 8,
    ]
    for level, mine in levels.items():
        name = COLUMNS[level][0]
        n = Counter(v["verdict"] for v in mine)
        if not mine:
            lines += [x for x in page.splitlines() if x.startswith(f"| {name} |")]
            continue
        lines.append(
            f"| {name} | {sum(v['samples'] for v in mine)} "
            f"| {len(own_operators(mine))} of {len({v['op'] for v in mine})} "
            f"| {n['own']} | {n['fallback']} | {n['random']} | {n['skipped']} | {n['wrong'] + n['crash']} |"
        )
    heads = " | ".join(head for _, head in COLUMNS.values())
    lines += ["", "The last five columns count operators by dtype.", ""]
    lines += [
        "- own: all of it is compiled by our own rules",
        "- fallback: right, and PyTorch ran the ops that are named",
        "- random: right in shape and dtype; the values are random",
        "- not supported: some sample fails in eager too, makes no dense tensor, or cannot be captured, "
        "for the reason given",
        "", f"| operator | dtypes | {heads} | why |", "|" + "---|" * (3 + len(COLUMNS)),
    ]  # fmt: skip
    cells = _cells(page)
    for v in verdicts:
        if v["level"] in COLUMNS:
            shown = v["verdict"].replace("skipped", "not supported")
            why = " ".join(v["reason"].split()).replace("|", "/")[:160]
            cells.setdefault((v["op"], v["dtype"]), {})[v["level"]] = (shown, why)
    rows: dict[tuple[str, ...], list[str]] = {}
    for (op, dtype), found in sorted(cells.items()):
        shown = [found.get(level, ("", ""))[0] for level in COLUMNS]
        why = next((found[level][1] for level in COLUMNS if level in found and found[level][1]), "")
        rows.setdefault((op, *shown, why), []).append(dtype)
    lines += [f"| {op} | {', '.join(dtypes)} | {' | '.join(rest)} |" for (op, *rest), dtypes in rows.items()]
    return "\n".join(lines) + "\n"


def _cells(page: str) -> dict[tuple[str, str], dict[str, tuple[str, str]]]:
    """What an earlier page says of every operator and dtype, by level: the verdict, and why."""
    found: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    heads: list[str] = []
    for line in page.splitlines():
        row = [x.strip() for x in line.split("|")[1:-1]]
        if row[:2] == ["operator", "dtypes"]:
            heads = row
        elif heads and len(row) == len(heads) and not row[0].startswith("---"):
            cell = dict(zip(heads, row, strict=True))
            levels = {level: cell[head] for level, (_, head) in COLUMNS.items() if cell.get(head)}
            for dtype in cell["dtypes"].split(", "):
                found[cell["operator"], dtype] = {level: (verdict, cell["why"]) for level, verdict in levels.items()}
    return found


if __name__ == "__main__":
    sys.exit(main())
