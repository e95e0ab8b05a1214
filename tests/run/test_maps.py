"""Tensor maps of a launch: encoded once for an address, and always those of the tensors at hand."""

import ctypes

import pytest

from terrazzo.hw.tma import TensorMap
from terrazzo.ir.types import bf16
from terrazzo.run import launch


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses that the driver is asked to encode."""
    asked: list[int] = []

    def encode(_: TensorMap, address: int) -> bytes:
        asked.append(address)
        return address.to_bytes(128, "little")

    monkeypatch.setattr(launch, "encode", encode)
    return asked


def _encode(m: launch._Map, address: int) -> int:
    m.addresses[0] = address
    m.encode()
    return int.from_bytes(ctypes.string_at(m.at, 128), "little")


def _map() -> launch._Map:
    return launch._Map((ctypes.c_void_p * 1)(), 0, TensorMap(bf16, (64, 64), (64, 1), (64, 64), 128))


def test_a_map_is_that_of_the_address(encoded: list[int]) -> None:
    m = _map()
    assert [_encode(m, a) for a in (16, 32, 16, 32, 32)] == [16, 32, 16, 32, 32]
    assert encoded == [16, 32]


def test_few_maps_are_kept(encoded: list[int]) -> None:
    m = _map()
    addresses = [16 * n for n in range(1, launch.KEPT_MAPS + 3)]
    assert [_encode(m, a) for a in addresses] == addresses
    assert len(m.made) == launch.KEPT_MAPS
    assert _encode(m, addresses[0]) == addresses[0]
    assert len(encoded) == len(addresses) + 1
