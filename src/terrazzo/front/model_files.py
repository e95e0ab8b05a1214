"""What a model's folder says, with suspicion: it was written by others, and what is wrong with it is no bug of ours."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from terrazzo.errors import TerrazzoError, UserError


@contextmanager
def loading(model: object) -> Iterator[None]:
    """UserError for what transformers, safetensors and PyTorch raise here: nothing of ours runs, so it is the model."""
    try:
        yield
    except (TerrazzoError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{model} cannot be loaded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    told = str(error)
    if "trust_remote_code" in told:
        return (
            "it comes with code of its own, which is never run here. "
            "In Python, load it yourself and call terrazzo.compile(model, ...)"
        )
    if "ignore_mismatched_sizes" in told:
        return "its tensors have other shapes than its config.json asks for"
    lines = told.strip().splitlines()
    # The name of an exception helps where its text is a mere key or number, and a text often ends on its first line.
    named = isinstance(error, (ValueError, OSError, RuntimeError)) and lines and not lines[0].endswith(":")
    return lines[0] if named else f"{type(error).__name__}: {' '.join(line.strip() for line in lines)}"


def tensors(folder: Path) -> dict[str, Path]:
    """The file of every tensor in the folder's safetensors; UserError for a file that is damaged or leads elsewhere."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if files := sorted(folder.glob("*.safetensors")):
            return {name: file for file in files for name in _names(file)}
        raise UserError(f"{folder} has no *.safetensors")
    there: dict[str, set[str]] = {}
    where = _index(index)
    for name, file in where.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{index}: {name} lies in {file!r}, which is no file of this folder")
        if file not in there:
            if not (folder / file).is_file():
                raise UserError(f"{index}: {name} lies in {file}, and there is no such file; fetch the model again")
            there[file] = set(_names(folder / file))
        if name not in there[file]:
            raise UserError(f"{index}: {name} lies in {file}, which has no such tensor; fetch the model again")
    return {name: folder / file for name, file in where.items()}


def _names(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as f:
            return list(f.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged ({error}); fetch the model again") from None


def _index(index: Path) -> dict[str, Any]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index} cannot be read: {type(error).__name__}: {error}; fetch the model again") from None
    if not isinstance(names, dict):
        raise UserError(f"{index}: weight_map is no table of tensors; fetch the model again")
    return names


def need_memory(what: str, module: Any) -> None:
    """UserError unless this machine has the memory for the weights of a module that has none yet (on "meta")."""
    needed = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    there = free_memory()
    if there is not None and needed > there:
        raise UserError(
            f"{what} has {needed / 1e9:.1f} GB of weights, and this machine has {there / 1e9:.1f} GB of memory left. "
            "Take a smaller model, or one layer of a large one (--layer 0)"
        )


def free_memory() -> int | None:
    """Bytes that processes may still take, or None where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        told = Path("/proc/meminfo").read_text(encoding="ascii")
        return int(told.split("MemAvailable:")[1].split()[0]) * 1024
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
