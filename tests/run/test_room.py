"""Few blocks of kernels that are launched early land evenly on processors."""

from __future__ import annotations

import pytest
import torch

import terrazzo
from terrazzo.hw.gpu import GPUS
from terrazzo.run.room import RESERVED, asked, crowded, even

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
    ],
)
def test_no_processor_takes_more_than_its_share_of_few_blocks(
    slots: int, blocks: int, shared: int, share: int | None
) -> None:
    found = even(slots, blocks, shared, 132, LARGEST)
    if share is None:
        assert found == shared
    else:
        assert shared < found <= LARGEST and (LARGEST + RESERVED) // (found + RESERVED) == share


PART, FINISH, POINTS = (4, 128, 38368), (16, 256, 0), (8, 352, 0)


def test_who_comes_after_a_kernel_that_fills_shared_memory_takes_its_share_too() -> None:
    """128 blocks leave 4 of 132 processors idle, to which as many of the next kernel's come as there are slots."""
    (part, finish, points), divided = asked([PART, FINISH, POINTS], 132, LARGEST)
    assert divided and part == even(*PART, 132, LARGEST) and finish == even(*FINISH, 132, LARGEST)
    assert (LARGEST + RESERVED) // (finish + RESERVED) == 2
    assert points == 0  # nothing that fills shared memory is before it


def test_who_shares_nothing_by_shared_memory_is_left_the_cache() -> None:
    assert asked([POINTS, FINISH, POINTS], 132, LARGEST) == ([0, 0, 0], False)
    assert asked([(16, 1320, 32), POINTS], 132, LARGEST) == ([32, 0], False)


def test_memory_is_divided_for_who_takes_most_of_it() -> None:
    assert not crowded([(8, 32), (16, 1024)], LARGEST)
    assert crowded([(8, 32), (3, 69088)], LARGEST) and crowded([(1, LARGEST)], LARGEST)


@pytest.mark.gpu
def test_softmax_asks_for_its_share() -> None:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    x = torch.randn(4 * processors - 16, 3584, device="cuda")
    ours = terrazzo.compile(lambda x: torch.softmax(x, -1), x)
    machine = ours.compiled.machine
    share = (GPUS[machine.arch].shared + RESERVED) // (machine.shared[0] + RESERVED)
    assert share == 4 or machine.shared[0] < 1024  # which has room for two launches, or takes its share
    torch.testing.assert_close(ours(x), torch.softmax(x, -1))
