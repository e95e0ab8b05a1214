"""What takes long says so on a terminal, and nowhere else."""

import io
import sys
import time

import pytest

from terrazzo import progress


class Terminal(io.StringIO):
    """A terminal that remembers what was written."""

    def isatty(self) -> bool:
        return True


def _seen(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, after: float) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "AFTER", after)
    monkeypatch.setenv("TERM", "xterm")
    with progress.working("compiling"):
        progress.at("lowering: fuse", 2, 11)
        time.sleep(0.3)
        with progress.working("compiling the rest"):  # shown in the place of the outer one
            progress.at("compiling kernels", 3, 7)
            time.sleep(0.3)
    progress.at("nothing is under way")
    return stream.getvalue()


def test_a_terminal_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _seen(monkeypatch, Terminal(), 0.05)
    assert "lowering: fuse" in seen and "2/11" in seen
    assert "compiling kernels" in seen and "3/7" in seen


def test_what_is_soon_done_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _seen(monkeypatch, Terminal(), 60) == ""


def test_a_pipe_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _seen(monkeypatch, io.StringIO(), 0.05) == ""


def test_an_error_ends_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "AFTER", 0.01)
    with pytest.raises(KeyError), progress.working("compiling"):
        time.sleep(0.1)
        raise KeyError
    assert progress._bar is None
