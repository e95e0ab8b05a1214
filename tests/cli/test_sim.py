"""`terrazzo sim` runs a kernel's text, and says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Terrazzo
from tests.kernels.by_hand import FOLDER

RING = (FOLDER / "ring.kernel").read_text()


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "some.kernel"
    path.write_text(text)
    return str(path)


def test_what_is_right(terrazzo: Terrazzo) -> None:
    out = terrazzo("sim", str(FOLDER / "ring.kernel"), "--interleave", "adversarial", "--runs", "2", "--costs").stdout
    assert "y: f32[128, 256]" in out and "nothing wrong found, in 2 adversarial orders" in out
    assert "256 multiply_async" in out


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("wait_groups(1, 'wgmma')", "pass", "TensorLoad writes x_s while another warp reads it"),
        (
            "expect(full[t % 4], 49152)",
            "expect(full[t % 4], 49151)",
            "49151 bytes are expected at full[0], and 49152 came",
        ),
        ("                fence('wgmma')\n", "", "no wgmma fence"),
        ("            wait_groups(0, 'wgmma')\n", "", "before it was waited for"),
        ("arrive(empty[(t + 3) % 4])", "pass", "waits for ever"),
    ],
)
def test_what_is_wrong(terrazzo: Terrazzo, tmp_path: Path, before: str, after: str, told: str) -> None:
    assert before in RING
    found = terrazzo("sim", written(tmp_path, RING.replace(before, after)), code=1).stdout
    assert told in found and "line " in found


def test_a_kernel_is_not_for_a_processor(terrazzo: Terrazzo) -> None:
    found = terrazzo("run", "--from", "kernel", str(FOLDER / "ring.kernel"), "--target", "cpu", code=2)
    assert "kernel IR runs on a GPU" in found.stderr
