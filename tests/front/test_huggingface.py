"""Models from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrazzo import UserError

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    """They would be random ones, and the exit status 0."""
    from terrazzo.front import huggingface

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=32)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    huggingface.load(str(tmp_path), seq_len=4)
    file = tmp_path / "model.safetensors"
    weights = safetensors.load_file(file)
    del weights["transformer.h.0.mlp.c_fc.weight"]
    safetensors.save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        UserError,
        match=r"has no weights for transformer\.h\.0\.mlp\.c_fc\.weight; complete it, or use --random-weights",
    ):
        huggingface.load(str(tmp_path), seq_len=4)
    huggingface.load(str(tmp_path), seq_len=4, random_weights=True)
