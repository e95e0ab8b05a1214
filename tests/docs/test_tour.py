"""The pages under docs/ say what is: the tour's commands print what it shows, and the generated pages can be
generated.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest
from docs.console import BLOCK, Command, commands, rewritten

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["tour.md", "schedules.md"])
def test_a_page_shows_what_is_printed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    page = (DOCS / name).read_text()
    written = re.search(r"with PyTorch (\d+\.\d+)", (DOCS / "tour.md").read_text())
    assert written, "the tour names the version of PyTorch that its output is from"
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    now = rewritten(page, work)
    if torch.__version__.startswith(written[1] + "."):  # others take some operations apart in another way
        changes = difflib.unified_diff(
            page.splitlines(), now.splitlines(), f"docs/{name}", "what is printed now", lineterm=""
        )
        assert now == page, "`make docs` writes the page anew:\n" + "\n".join(changes)
    assert "compiler bug" not in now


def test_the_tour_walks_through_every_stage() -> None:
    lines = [c.line for block in BLOCK.findall((DOCS / "tour.md").read_text()) for c in commands(block)]
    for words in (
        "--ir torch",
        "--ir tensor",
        "--ir loop",
        "--ir cpp",
        "-vv",
        "--materialize",
        "--dump",
        "--from loop",
        "opt ",
        "explain ",
    ):
        assert any(words in line for line in lines), words


def test_blocks_are_read_as_a_shell_would() -> None:
    block = '$ one \\\n>   | two\nout\n\nput\n$ three "a\n> b"\n$ four\n> 5\n'
    assert [(c.line, c.output) for c in commands(block)] == [
        ("one   | two", "out\n\nput\n"),
        ('three "a\nb"', ""),
        ("four\n5", ""),
    ]


def test_dots_stand_for_anything() -> None:
    command = Command("$ x", "took ... us\n(done)\n")
    assert command.agrees("took 12.5 us\n(done)\n")
    assert not command.agrees("took 12.5 ms\n(done)\n")
    assert not command.agrees("took 12.5 us\n(done)\nmore\n")


def test_the_manual_has_every_op_rule_pass_and_option(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import fields

    from docs import generate
    from terrazzo.ir.node import OPS
    from terrazzo.ir.parse_plan import KINDS
    from terrazzo.options import Options
    from terrazzo.pipelines import PASSES
    from terrazzo.rules import tensor_to_loop, torch_to_tensor
    from terrazzo.rules.tile import complete

    irs = ("torch", "tensor", "loop", "kernel", "index")
    assert all(f"### {op.__name__}\n" in generate.ir() for name in irs for op in OPS[name].values())
    assert all(f"### {kind.__name__}\n" in generate.ir() for kind in KINDS.values())
    page = (DOCS / "schedules.md").read_text()
    assert generate.with_lines(page) == page and all(f"| `{op}` |" in page for op in KINDS)
    readme = (DOCS.parent / "README.md").read_text()
    assert generate.with_overview(readme) == readme and "| attention, forward |" in readme
    text = generate.rules()
    assert all(f"**{rule.name}**" in text for rule in complete.RULES)
    assert all(f"**{rule.name}**" in text for rule in torch_to_tensor.RULES)
    assert all(f"### {rule.name}\n" in text for rule in tensor_to_loop.RULES)
    assert all(f"| {p.name} |" in generate.passes() for p in PASSES)
    assert all(f"| {f.name} |" in generate.options() for f in fields(Options))
    assert "## terrazzo bench cpu" in generate.commands()
    assert "| fmod |" in generate.scalars() and "| welford | 3 | (mean," in generate.scalars()
    assert generate.performance().startswith("# Performance\n")
