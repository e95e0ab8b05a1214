"""What all tests share."""

from __future__ import annotations

from importlib.metadata import entry_points


def pytest_configure() -> None:
    """Where Terrazzo is on the path but not installed, nothing announces its backend to PyTorch."""
    if not entry_points(group="torch_dynamo_backends", name="terrazzo"):
        from torch._dynamo import register_backend

        from terrazzo.front.dynamo import terrazzo

        register_backend(terrazzo, name="terrazzo")
