"""What the pages name is there: links, folders, files."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from terrazzo.ir.plan import Line
from terrazzo.rules.tile.complete import RULES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
BASES = (
    "",
    "src/terrazzo",
    "src/terrazzo/ir",
    "src/terrazzo/rules",
    "src/terrazzo/targets/cuda",
    "tests",
    "tests/rules",
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [x.partition("#")[0] for x in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?:", x)]
    assert not [x for x in links if x and not (page.parent / x).exists()]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/glossary.md"])
def test_files_that_are_named_exist(name: str) -> None:
    words = re.findall(r"`([\w.-]+(?:/[\w.-]*)+|\w+\.(?:py|h))`", (ROOT / name).read_text(encoding="utf-8"))
    words = [w for w in words if not w.startswith(("~", "."))]
    kernel = [ROOT / "src/terrazzo/ir/dialects"]
    missing = [w for w in words if not any((base / w).exists() for base in (*(ROOT / b for b in BASES), *kernel))]
    assert words and not missing


def test_the_table_of_the_readme_names_folders() -> None:
    rows = re.findall(r"^\| (`src/.*?) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = [w for row in rows for w in re.findall(r"`([^`]+)`", row)]
    assert len(named) >= 9
    assert not [w for w in named if not any((ROOT / b / w).exists() for b in ("", "src/terrazzo"))]


def test_the_glossary_has_every_word_of_ours() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    defined = {
        w.strip().lower() for head in re.findall(r"^- \*\*(.+?)\.\*\*", text, re.MULTILINE) for w in head.split(",")
    }
    ours = "slab box digit meet place site frame ring slot phase term nest monoid role agent team tail pin plan"
    assert set(ours.split()) <= defined


def test_what_the_adr_of_plans_counts() -> None:
    """Kinds of lines and rules as they are; conditions and errors, which come and go with every change, nearly."""
    adr = next((ROOT / "docs/adr").glob("008*")).read_text(encoding="utf-8")
    counts = r"All (\d+) kinds of lines .*?: (\d+) of them, with (\d+) conditions .*? (\d+) errors"
    told = re.search(counts, adr, re.DOTALL)
    assert told is not None
    lines, rules, conditions, errors = map(int, told.groups())
    assert (lines, rules) == (len(Line.__subclasses__()), len(RULES))
    files = (ROOT / "src/terrazzo/rules/tile").glob("*.py")
    trees = [ast.parse(f.read_text(encoding="utf-8")) for f in files]
    calls = [n.func for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call)]
    found = Counter(f.id if isinstance(f, ast.Name) else getattr(f, "attr", "") for f in calls)
    assert 0.9 <= found["need"] / conditions <= 1.1
    assert 0.8 <= (found["fail"] + found["UserError"]) / errors <= 1.2
