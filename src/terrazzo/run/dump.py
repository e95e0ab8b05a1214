"""`Options.dump`, `--dump DIR`: every stage as a file that can be read back, the kernels' C++, the events and the
options.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from terrazzo.errors import UserError
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import show
from terrazzo.options import Options
from terrazzo.pipelines import Lowering, dialect
from terrazzo.rewrite.rule import Event
from terrazzo.targets.cpu.emit import emit
from terrazzo.targets.cuda import emit as cuda

STAGES = {
    "torch": "00-torch.txt",
    "tensor": "01-tensor.txt",
    "tensor_to_loop": "02-loop.txt",
    "loop": "03-fused.txt",
    "tile": "04-tile.txt",
    "kernel": "05-kernel.txt",
}


def write(directory: Path, done: Lowering, options: Options) -> None:
    """Write everything; a file is complete or not there at all. UserError where the directory cannot be written."""
    files: dict[str, str] = {}
    for program in (done.source, *(stage[1] for stage in done.stages)):
        files[STAGES[dialect(program)]] = show(program)  # of the passes that stay in Loop IR the last one counts
    if (lifted := done.lifted()) is not None:
        files[STAGES["tensor_to_loop"]] = show(lifted)
    kernels = done.at("kernel")
    for number, step in enumerate((kernels or done.loop).steps):
        if isinstance(step, l.Kernel):
            files[f"kernels/{number:03}-{step.name}.cpp"] = emit(step)[1]
        elif isinstance(step, k.Kernel):
            files[f"kernels/{number:03}-{step.name}.cu"] = cuda.prelude() + cuda.emit(step)[1]
    files["events.jsonl"] = "".join(json.dumps(event_json(event)) + "\n" for event in done.log.events)
    files["options.json"] = json.dumps(dataclasses.asdict(options), indent=2, default=str) + "\n"
    try:
        (directory / "kernels").mkdir(parents=True, exist_ok=True)
        earlier = {*(directory / name for name in STAGES.values()), *(directory / "kernels").glob("*.c*")}
        for stale in earlier - {directory / name for name in files}:
            stale.unlink(missing_ok=True)  # stages of two programs, mixed, would mislead
        for name, text in files.items():
            write_file(directory / name, text)
    except OSError as error:
        raise UserError(
            f"dump {directory}: {error.filename or ''} cannot be written: {error.strerror or error}"
        ) from None


def write_file(path: Path, text: str) -> None:
    """Write a file at once: under a temporary name, then renamed. Ctrl-C leaves nothing half-written."""
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def event_json(event: Event) -> dict[str, Any]:
    """An event as a line of events.jsonl has it."""
    return {("pass" if k == "pass_name" else k): v for k, v in dataclasses.asdict(event).items()}
