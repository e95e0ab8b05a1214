"""Few blocks of kernels that are launched early land evenly on processors."""

from __future__ import annotations

import pytest
import torch

import terrazzo
from terrazzo.hw.gpu import GPUS
from terrazzo.run.room import LONG, RESERVED, Launched, even, late

LARGEST = GPUS["sm_90a"].shared


@pytest.mark.parametrize(
    "slots, blocks, shared, share",
    [
        (7, 512, 32, 4),  # a softmax: of the next one's blocks, 3 find room on a processor, and the rest would pile up
        (3, 256, 69088, 2),  # a product on CUDA cores
        (4, 128, 39120, 1),  # another, of which a processor that is through sooner would take four blocks
        (3, 392, 69088, None),  # full processors are even
        (1, 132, 172120, None),
        (16, 1320, 32, None),  # of ten blocks, one more is little
        (16, 256, 0, None),  # who shares nothing by shared memory is left the cache
    ],
)
def test_no_processor_takes_more_than_its_share_of_few_blocks(
    slots: int, blocks: int, shared: int, share: int | None
) -> None:
    found = even(Launched(slots, blocks, shared, 0), 132, LARGEST)
    if share is None:
        assert found == shared
    else:
        assert (LARGEST + RESERVED) // (found + RESERVED) == share
        assert (LARGEST + RESERVED) // (found + RESERVED - 128) == share + 1  # the rest is cache


@pytest.mark.parametrize(
    "slots, blocks, waits",
    [
        (1, 74, True),  # they fill some parts of the chip, and leave others empty
        (2, 148, True),  # two on each of 74 processors
        (1, 132, True),  # each fills a processor
        (2, 132, False),
        (1, 148, False),  # the last come wherever a processor is through
        (16, 1400, False),
    ],
)
def test_long_work_of_blocks_that_fill_a_processor_comes_to_an_idle_chip(slots: int, blocks: int, waits: bool) -> None:
    assert late(Launched(slots, blocks, 82000, LONG), 132) == waits
    assert not late(Launched(slots, blocks, 82000, LONG - 1), 132)


@pytest.mark.gpu
def test_softmax_asks_for_its_share() -> None:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    x = torch.randn(4 * processors - 16, 3584, device="cuda")
    ours = terrazzo.compile(lambda x: torch.softmax(x, -1), x)
    machine = ours.compiled.machine
    shared, early = machine.room[0]
    assert early and ((GPUS[machine.arch].shared + RESERVED) // (shared + RESERVED) == 4 or shared < 1024)
    torch.testing.assert_close(ours(x), torch.softmax(x, -1))
