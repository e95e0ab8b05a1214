"""One block of a real GPU, and nvcc where there is none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def run_block(source: str, *arrays: Any, threads: int = 32, arch: str = "", shared: int = 0) -> list[Any]:
    """Compile the kernel `one` and run one block of it, with so many bytes of `shared` memory, on copies of `arrays`;
    what they hold then.
    """
    torch = pytest.importorskip("torch")
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device()
    device.set_current()
    stream = device.create_stream()
    compiled = Program(
        source,
        code_type="c++",
        options=ProgramOptions(arch=arch or f"sm_{device.arch}", device_as_default_execution_space=True),
    ).compile("cubin")
    there = [torch.from_numpy(a.copy()).cuda() for a in arrays]
    torch.cuda.synchronize()
    config = LaunchConfig(grid=1, block=threads, shmem_size=shared)
    launch(stream, config, compiled.get_kernel("one"), *(a.data_ptr() for a in there))
    stream.sync()
    return [a.cpu().numpy() for a in there]


def assemble(instructions: Iterable[tuple[int | str, str]], directory: Path) -> None:
    """Compile the kernels `one` of (first architecture, source) for each of these architectures that has them."""
    given = list(instructions)
    for arch in dict.fromkeys(since for since, _ in given):
        has = [
            source
            for since, source in given
            if since == arch or (isinstance(since, int) and isinstance(arch, int) and since < arch)
        ]
        mine = [source.replace("one(", f"one{k}(") for k, source in enumerate(has)]
        (directory / "all.cu").write_text("\n".join(mine))
        subprocess.run(
            ["nvcc", f"-arch=sm_{arch}", "-cubin", "-o", directory / "all.cubin", directory / "all.cu"], check=True
        )
