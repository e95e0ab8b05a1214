"""An example for every lowering of an ATen op: the op, and what its rule makes of it, as text. A file per topic lies
beside this one.

Nobody writes them: `python -m tests.rules.lowerings` (with src and . on the path) finds the plainest call of each op in
PyTorch's operator database, for rules that have no example yet, and writes down what all rules make of their examples
now. Read the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from terrazzo.ir.text import parse, show
from terrazzo.rewrite.rule import Log
from terrazzo.rules import torch_to_tensor
from terrazzo.rules.torch_to_tensor.lower import lower

HERE = Path(__file__).parent
TOPICS = {
    r.name: m.__name__.rsplit(".", 1)[-1] for m in vars(torch_to_tensor).values() for r in getattr(m, "RULES", ())
}
"""The file each rule is in, by the rule's name."""


def examples() -> dict[str, tuple[str, str]]:
    """The texts before and after, by the rule's name."""
    found = {}
    for path in sorted(HERE.glob("*.txt")):
        for block in path.read_text().split("# ")[1:]:
            name, text = block.split("\n", 1)
            before, after = text.split("=>\n")
            found[name] = before, after.rstrip("\n") + "\n"
    return found


def lowered(before: str) -> tuple[Any, Any, set[str]]:
    """The program of a text, what it is lowered to, and the rules that did it."""
    log = Log(applications=[])
    program = parse(before)
    return program, lower(program, torch_to_tensor.RULES, log), {a.rule for a in log.applications or []}


def write(befores: dict[str, str]) -> None:
    """Write the files anew, with what the rules make of these texts."""
    for topic in dict.fromkeys(TOPICS.values()):
        blocks = [
            f"# {n}\n{befores[n]}=>\n{show(lowered(befores[n])[1])}"
            for n, t in TOPICS.items()
            if t == topic and n in befores
        ]
        (HERE / f"{topic}.txt").write_text("\n".join(blocks))
