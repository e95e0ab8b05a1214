"""The backend of torch.compile is known where the package is imported and not installed, in whichever order."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import importlib.metadata
from importlib.metadata import EntryPoints

importlib.metadata.entry_points = lambda **_: EntryPoints()  # as where nothing of it is installed
{imports}
import sys
assert {torch} == ("torch" in sys.modules), "torch takes seconds to import, so the package does not"
import torch

x = torch.randn(4, 4)
for options in (None, {{"strict": True}}):
    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend="terrazzo", options=options)
    assert torch.equal(compiled(x), torch.relu(x) + 1)
import torch._dynamo.backends.registry as registry
assert registry.lookup_backend("terrazzo").__module__ == "terrazzo.front.registered"
assert not any(type(finder).__module__.startswith("terrazzo") for finder in sys.meta_path)
"""


@pytest.mark.parametrize(
    ("imports", "torch"),
    [("import terrazzo", False), ("import torch, terrazzo", True), ("import torch._dynamo, terrazzo", True)],
)
def test_the_backend_is_known_without_an_entry_point(imports: str, torch: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = PROGRAM.format(imports=imports, torch=torch)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr


ENTERED = """
import importlib.metadata
from importlib.metadata import EntryPoint, EntryPoints

point = EntryPoint("terrazzo", "terrazzo.front.dynamo:terrazzo", "torch_dynamo_backends")
found = EntryPoints([point])  # as where it is installed
importlib.metadata.entry_points = lambda **of: found.select(**of)
{imports}
import torch

assert torch.equal(torch.compile(lambda x: torch.relu(x) + 1, backend="terrazzo")(torch.ones(4)), 2 * torch.ones(4))
"""


@pytest.mark.parametrize("imports", ["", "import terrazzo"])
def test_the_backend_of_an_entry_point_is_not_registered_twice(imports: str) -> None:
    """PyTorch imports the package when it is asked for the backend by name."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = ENTERED.format(imports=imports)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
