"""What the machine lacks or broke: no compiler, a full disk, a damaged cache. Results stay right or an error says why
not.
"""

from __future__ import annotations

import errno
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Terrazzo

ADD = "torch.relu(torch.randn(3, 5))"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terrazzo: Terrazzo) -> Path:
    """A cache of this test's own; asks for `terrazzo`, which sets another, first."""
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(cache: Path) -> list[Path]:
    return sorted(p for p in cache.rglob("*") if p.is_file())


def test_without_a_compiler_the_interpreter_runs_and_says_so(
    terrazzo: Terrazzo, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terrazzo.run.compiler._candidates", lambda: iter(()))
    monkeypatch.setattr("terrazzo.run.compiled._said", set())
    result = terrazzo("run", "-c", ADD, "--check")
    assert "check: ok" in result.stdout
    assert result.stderr == (
        "warning: no C++ compiler was found, so the interpreter runs instead, which is slow; "
        "install one, for example with `apt install g++` or `pip install ziglang`\n"
    )


@pytest.mark.parametrize(
    "damage", [b"", b"not what was written", b"\x7fELF" + bytes(60)], ids=["empty", "text", "header"]
)
def test_damaged_entries_are_ignored_and_rebuilt(terrazzo: Terrazzo, cache: Path, damage: bytes) -> None:
    terrazzo("run", "-c", ADD)
    sound = {p: p.read_bytes() for p in entries(cache)}
    for path in sound:
        path.unlink()  # a new file: what this process has loaded must not change under it
        path.write_bytes(damage)
    result = terrazzo("run", "-c", ADD, "--check")
    assert "check: ok" in result.stdout and result.stderr == ""
    assert {p: p.read_bytes() for p in entries(cache) if p.suffix == ".plan"} == {
        p: b for p, b in sound.items() if p.suffix == ".plan"
    }


def test_foreign_files_are_left_alone(terrazzo: Terrazzo, cache: Path) -> None:
    terrazzo("run", "-c", ADD)
    folder = entries(cache)[0].parent
    foreign = [folder / "notes.txt", folder / ("0" * 64 + ".so"), cache / "README"]
    for path in foreign:
        path.write_text("mine")
    assert "check: ok" in terrazzo("run", "-c", ADD, "--check").stdout
    terrazzo("cache", "clear")
    assert entries(cache) == sorted(foreign)


def test_a_cache_that_others_can_write_is_refused(terrazzo: Terrazzo, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert terrazzo("run", "-c", ADD, code=2).stderr.startswith(
        f"error: other users can write in the cache {cache}, and compiled code"
    )


def test_a_full_disk_under_the_cache(terrazzo: Terrazzo, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be kept is compiled for this process only; a warning says so."""
    full_disk(monkeypatch, lambda path: str(path).startswith(str(cache)))
    result = terrazzo("run", "-c", ADD, "--check")
    assert "check: ok" in result.stdout
    assert result.stderr.startswith(
        f"warning: the cache {cache} cannot be written (No space left on device); what is compiled now is lost"
    )
    assert result.stderr.count("\n") == 1


def test_full_disks_everywhere(terrazzo: Terrazzo, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, lambda path: True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = terrazzo("run", "-c", ADD, code=2).stderr
    assert re.search(r"^error: neither the cache .* nor the temporary directory .* can be written", told, re.MULTILINE)


def test_a_full_disk_under_a_dump(terrazzo: Terrazzo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, lambda path: "dump" in str(path))
    told = terrazzo("compile", "-c", ADD, "--dump", str(tmp_path / "dump"), code=2).stderr
    assert re.fullmatch(rf"error: dump {tmp_path}/dump: .* cannot be written: No space left on device\n", told)
    assert entries(tmp_path / "dump") == []


def full_disk(monkeypatch: pytest.MonkeyPatch, concerns: Any) -> None:
    """Renaming a finished file into its place fails, for the paths this concerns."""

    def failing(original: Any) -> Any:
        def replace(source: Any, target: Any) -> None:
            if concerns(target):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
            original(source, target)

        return replace

    for owner in (os, Path):
        monkeypatch.setattr(owner, "replace", failing(owner.replace))
