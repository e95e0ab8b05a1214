"""compute-sanitizer finds nothing in any kernel of the tests."""

from __future__ import annotations

import shutil

import pytest
from tests.kernels.sanitize import TOOLS, sanitized


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="there is no compute-sanitizer here")
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_found(tool: str) -> None:
    found = sanitized(tool)
    assert found["kernels"] and found["errors"] == 0, "\n".join(found["report"])
