"""What only a process of its own can show: start-up, streams, exit codes, signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.examples import SOFTMAX

ROOT = Path(__file__).parents[2]


def terrazzo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), env=surroundings(**environment), capture_output=True, text=True, timeout=120)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "terrazzo", *words]


def surroundings(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **more}


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, terrazzo.cli.app; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], env=surroundings()).returncode == 0
    shown = terrazzo("--help")
    assert shown.returncode == 0
    for name in ("compile", "run", "explain", "opt", "targets", "cache", "doctor", "bench"):
        assert re.search(rf"\b{name}\b", shown.stdout)


def test_errors_go_to_stderr_without_a_traceback() -> None:
    result = terrazzo("compile")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: give one of MODEL, -c CODE and --from IR FILE; got none\n"


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    for words in (("--debug", "compile"), ("compile", "--debug")):
        result = terrazzo(*words)
        assert result.returncode == 1
        assert "Traceback" in result.stderr and "UserError: give one of" in result.stderr


def test_a_bug_says_what_to_report(tmp_path: Path) -> None:
    code = "import sys, terrazzo.ir.text as t; t.parse = lambda *a: 1 / 0; import terrazzo.cli as c; c.main()"
    words = [sys.executable, "-c", code, "opt", __file__]
    result = subprocess.run(words, env=surroundings(), capture_output=True, text=True)
    assert result.returncode == 70
    assert result.stderr.startswith(
        "compiler bug: ZeroDivisionError: division by zero\nPlease report this with the output of:\n"
    )
    assert f"    terrazzo --debug opt {__file__}\n(terrazzo " in result.stderr


def test_colours_only_where_they_can_be_seen() -> None:
    pty = pytest.importorskip("pty")

    def seen(**environment: str) -> str:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            command("opt", str(Path(__file__).with_name("example.txt"))),
            env=surroundings(TERM="xterm-256color", **environment),
            stdout=theirs,
        )
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:  # how Linux says that the other side is closed
            pass
        os.close(ours)
        assert process.wait(timeout=60) == 0
        return shown.decode().replace("\r\n", "\n")

    plain = Path(__file__).with_name("example.txt").read_text()
    assert "\x1b[" in seen()
    assert seen(NO_COLOR="1") == plain
    assert terrazzo("opt", str(Path(__file__).with_name("example.txt"))).stdout == plain


def test_a_reader_may_stop_early() -> None:
    process = subprocess.Popen(
        command("compile", "-c", SOFTMAX, "--no-fuse", "-vv"),
        env=surroundings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


def test_ctrl_c_leaves_no_half_written_file(tmp_path: Path) -> None:
    """Interrupted at many moments of a dump, a file is complete or not there."""
    code = "x = torch.randn(8)\n" + "x = torch.sin(x) * 2\n" * 150 + "x"
    whole = tmp_path / "whole"
    assert terrazzo("compile", "-c", code, "--no-fuse", "--dump", str(whole)).returncode == 0
    files = {p.relative_to(whole): p.read_text() for p in whole.rglob("*") if p.is_file()}
    assert len(files) > 300
    cut = tmp_path / "cut"
    process = subprocess.Popen(
        command("compile", "-c", code, "--no-fuse", "--dump", str(cut)),
        env=surroundings(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not (cut / "kernels").is_dir() or len(list((cut / "kernels").iterdir())) < 20:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.0005)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) in (130, 0)
    assert process.stderr is not None and b"Traceback" not in process.stderr.read()
    left = {p.relative_to(cut): p.read_text() for p in cut.rglob("*") if p.is_file()}
    assert all(files[name] == text for name, text in left.items() if name.name != "options.json")


def test_ctrl_c_is_exit_code_130() -> None:
    interrupt = "lambda *a: os.kill(os.getpid(), signal.SIGINT)"
    code = f"import os, signal, terrazzo.ir.text as t; t.parse = {interrupt}; import terrazzo.cli as c; c.main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "opt", __file__], env=surroundings(), capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_a_full_disk_under_the_output_is_told() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        result = subprocess.run(command("targets"), env=surroundings(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (2, "error: output: No space left on device\n")
