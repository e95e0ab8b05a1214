"""`torch.compile(backend="terrazzo")` where the package is imported and not installed.

PyTorch finds an installed package's backend by its entry point. Where the package is only on the path there is none, so
the backend is registered: as soon as PyTorch's list of backends is there, which is seldom when the package is imported,
and would take seconds to import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

REGISTRY = "torch._dynamo.backends.registry"


def register() -> None:
    """Have PyTorch know the backend, now or when it comes to its list of backends."""
    if (registry := sys.modules.get(REGISTRY)) is not None:
        _enter(registry)
    elif not any(isinstance(finder, _Registry) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Registry())


class _Registry(MetaPathFinder):
    """Finds PyTorch's list of backends as others do, and registers the backend once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and (loader := spec.loader) is not None:
            load = loader.exec_module

            def loaded(module: ModuleType) -> None:
                load(module)
                _enter(module)

            loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def _enter(registry: Any) -> None:
    """Register the backend, but where PyTorch knows it by its entry point, which may be what imports the package."""
    if "terrazzo" not in registry._BACKENDS:
        registry.register_backend(terrazzo)


def terrazzo(*args: Any, **kwargs: Any) -> Any:
    """The backend, imported when it is called."""
    from terrazzo.front import dynamo

    return dynamo.terrazzo(*args, **kwargs)
