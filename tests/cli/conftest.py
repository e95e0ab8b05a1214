"""The command line, run in this process: torch is imported once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

Terrazzo = Callable[..., Any]


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def terrazzo(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Terrazzo:
    """`terrazzo(*words)` gives the result; `code=` is the exit code it must have."""
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(cache_dir))

    def run(*words: str, code: int = 0) -> Any:
        from terrazzo.cli.app import app

        result = CliRunner().invoke(app, list(words), prog_name="terrazzo")
        assert result.exit_code == code, f"{result.stdout}\n{result.stderr}\n{result.exception!r}"
        return result

    return run
