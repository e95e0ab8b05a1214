"""The table of all that was measured on a GPU."""

from __future__ import annotations

from terrazzo.bench.overview import HEAD, overview


def case(dtype: str, group: str = "", problem: str = "", **us: float) -> dict[str, object]:
    return {"dtype": dtype, "group": group, "problem": problem, "us": us}


def test_a_row_for_each_kind_and_type_beside_the_fastest_peer() -> None:
    attention = {
        "suite": "attention",
        "meta": {"gpu": "NVIDIA H200"},
        "cases": [
            case("bf16", "forward", terrazzo=10.0, cudnn=20.0, eager=40.0),
            case("bf16", "forward", terrazzo=10.0, cudnn=20.0, flash=5.0),
            case("f16", "forward", terrazzo=10.0, cudnn=9.0),
            case("bf16", "decode", problem="wrong", terrazzo=1.0, cudnn=20.0),
            case("bf16", "decode"),
        ],
    }
    programs = {
        "suite": "programs",
        "meta": {"gpu": "NVIDIA H100 80GB HBM3"},
        "cases": [{**case("f32", terrazzo=2.0, eager=3.0)}, {"failed": "spilled"}],
    }
    unknown = {"suite": "counters", "cases": [case("bf16", terrazzo=1.0, eager=1.0)]}
    assert overview([programs, unknown, attention]) == [
        HEAD,
        ("attention, forward", "bf16", "H200", "2", "PyTorch, cuDNN, FlashAttention", "**1.00**", "0.50"),
        ("attention, forward", "f16", "H200", "1", "cuDNN", "**0.90**", "0.90"),
        ("model programs and training steps", "f32", "H100", "1", "PyTorch", "**1.50**", "1.50"),
    ]
