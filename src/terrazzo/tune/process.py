"""The worker's process, from outside: jobs are sent, answers awaited, and what does not answer is ended."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from terrazzo.errors import UserError
from terrazzo.options import Options

STARTS, ANSWERS = 120.0, 30.0
"""Seconds a worker has to start, with all that it loads, and for each answer."""
_RUN = "import sys; sys.path.insert(0, {root!r}); from terrazzo.tune.worker import main; main()"


class Ended(Exception):
    """A worker that ended, or was ended, before it answered: why."""


class Worker:
    """A process that measures candidates on a device, started when there is a job, and anew after one that ended it."""

    def __init__(self, device: str, options: Options, command: Sequence[str] = ()) -> None:
        root = str(Path(__file__).parents[2])
        self.command = tuple(command) or (sys.executable, "-c", _RUN.format(root=root))
        self.job = {
            "target": options.target,
            "device": device,
            "cache_dir": str(options.cache_dir),
            "cache_limit": options.cache_limit,
        }
        self.process: subprocess.Popen[str] | None = None
        self.answers: queue.Queue[str] = queue.Queue()
        self.listeners: list[threading.Thread] = []
        self.complaints: deque[str] = deque(maxlen=1)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def measure(self, programs: Sequence[str], seconds: float, source: str = "") -> list[tuple[str, float | None]]:
        """For every program why it is out, or "", and the microseconds it took, of inputs that the program `source`
        writes, if there is one, beside random ones. One during which the process ends, or does not answer, is out, and
        the others are measured without it.
        """
        found: list[tuple[str, float | None]] = [("", None)] * len(programs)
        left = list(range(len(programs)))
        while left:
            done = 0
            try:
                self._send({"programs": [programs[n] for n in left], "seconds": seconds, "source": source, **self.job})
                for n in left:
                    found[n] = str(self._answer(ANSWERS)), None
                    done += 1
                times = self._answer(ANSWERS + seconds)
            except Ended as why:
                self._end()
                for n in left[done : done + 1] or left:
                    found[n] = str(why), None
                left = [n for n in left if not found[n][0]]
            else:
                for n, us in zip(left, times, strict=True):
                    found[n] = found[n][0], us
                break
        return found

    def _send(self, job: dict[str, Any]) -> None:
        """UserError where no worker can be started."""
        if self.process is None:
            self._start()
            try:
                self._answer(STARTS)
            except Ended as why:
                self._end()
                raise UserError(f"the process that measures kernels cannot start: {why}") from None
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise Ended(self._last_words()) from None

    def _start(self) -> None:
        self.answers, self.complaints = queue.Queue(), deque(["it said nothing"], maxlen=1)
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # Ctrl-C is for us, who end it
        )
        hear = partial(_hear, self.process.stdout, self.answers)
        listen = partial(self.complaints.extend, filter(str.strip, self.process.stderr or ()))
        self.listeners = [threading.Thread(target=x, daemon=True) for x in (hear, listen)]
        for thread in self.listeners:
            thread.start()

    def _answer(self, seconds: float) -> Any:
        try:
            line = self.answers.get(timeout=seconds)
        except queue.Empty:
            raise Ended(f"it gave no answer in {seconds:g} s") from None
        if not line:
            raise Ended(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        """What the process said when it ended."""
        assert self.process is not None
        code = self.process.wait()
        self.listeners[-1].join(1.0)
        return f"its process ended with {code}: {self.complaints[0].strip()[:300]}"

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def _hear(lines: Any, answers: queue.Queue[str]) -> None:
    """Pass lines on; an empty one is the end."""
    for line in lines:
        answers.put(line)
    answers.put("")
