"""PyTorch's operator database through Terrazzo."""

from __future__ import annotations

import sys
import unittest
from importlib.util import find_spec
from types import ModuleType

if find_spec("expecttest") is None:  # the database imports it for tests of PyTorch's own, which nothing here runs
    stand_in = ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    stand_in.assert_expected_inline = None  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in
