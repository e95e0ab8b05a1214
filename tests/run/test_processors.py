"""Processors there are for us, and threads of kernels: in containers, in workers, in children of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from terrazzo.run import processors as found
from terrazzo.run.processors import processors, team

USABLE = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("max 100000\n",), USABLE),
        (("50000 100000\n",), 1),
        (("100000 100000\n",), 1),
        (("64000000 100000\n",), USABLE),
        (("-1\n", "100000\n"), USABLE),
        (("100000\n", "100000\n"), 1),
        (("what\n",), USABLE),
        ((), USABLE),
    ],
)
def test_a_container_has_as_many_processors_as_its_quota(tmp_path: Path, texts: tuple[str, ...], expected: int) -> None:
    files = []
    for k, text in enumerate(texts):
        (tmp_path / str(k)).write_text(text)
        files.append(str(tmp_path / str(k)))
    assert processors(((*files,), (str(tmp_path / "absent"),)) if files else ((str(tmp_path / "absent"),),)) == expected


def test_kernels_have_as_many_threads_as_pytorch_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(found, "_first", 0)
    assert (team(None), team(5), team(1)) == (3, 5, 1)


def test_a_child_of_a_process_that_had_threads_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "_first", os.getpid() + 1)
    assert (team(4), team(1)) == (1, 1)


# The child runs nothing of PyTorch's: with several threads, that would wait for its own OpenMP's, which stayed behind.
FORKS = """
import os, signal, sys, torch, terrazzo
from terrazzo.options import Options

x = torch.rand(4096, 64)
f = terrazzo.compile(lambda x: x.exp().sum(1), x, options=Options(target="cpu", threads=2))
want = f(x).tolist()
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if f(x).tolist() == want else 1)
sys.exit(os.waitpid(child, 0)[1])
"""


def test_a_child_ends() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
