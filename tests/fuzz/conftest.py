"""The command line, as in tests/cli."""

from tests.cli.conftest import cache_dir, terrazzo

__all__ = ["cache_dir", "terrazzo"]
