"""What ptxas made of a kernel: its machine code, as nvdisasm shows it."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from terrazzo.ir.dialects import kernel as k
from terrazzo.run.cache import Cache
from terrazzo.run.nvrtc import compile_each, nvrtc_version
from terrazzo.targets.cuda.emit import emit


@cache
def nvdisasm() -> str:
    """Where nvdisasm is: in the package nvidia-cuda-nvdisasm, or on the path."""
    inside = Path(sysconfig.get_path("purelib"), "nvidia")
    found = [str(path) for path in inside.glob("cu*/bin/nvdisasm")] + [shutil.which("nvdisasm")]
    return next((path for path in found if path), "")


def sass(kernel: k.Kernel, arch: str, folder: Path) -> list[str]:
    """The instructions of a kernel, one a line. Skips where NVRTC or nvdisasm is missing."""
    return disassembled(emit(kernel)[1], arch, folder)


def disassembled(source: str, arch: str, folder: Path) -> list[str]:
    """The same of a source without the prelude."""
    pytest.importorskip("cuda.bindings")
    if not nvdisasm():
        pytest.skip("there is no nvdisasm here; `pip install nvidia-cuda-nvdisasm`")
    nvrtc_version()
    (made,) = compile_each([source], arch, Cache(folder, 1 << 30)).values()
    assert made.path is not None, made.facts
    told = subprocess.run([nvdisasm(), "-c", str(made.path)], capture_output=True, text=True, check=True).stdout
    return [line.split("*/", 1)[1].strip().rstrip(" ;") for line in told.splitlines() if line.strip().startswith("/*")]
