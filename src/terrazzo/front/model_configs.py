"""Configurations of real models, so that they can be built with random weights where there is no network.

The numbers are those of the models' own config.json files.
"""

from __future__ import annotations

from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": {
        "model_type": "llama", "architecture": "causal-lm",
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "Qwen/Qwen2.5-7B": {
        "model_type": "qwen2", "architecture": "causal-lm",
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "meta-llama/Meta-Llama-3-8B": {
        "model_type": "llama", "architecture": "causal-lm",
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "openai-community/gpt2": {
        "model_type": "gpt2", "architecture": "causal-lm",
        "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "vocab_size": 50257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05,
    },
    "google-bert/bert-base-uncased": {
        "model_type": "bert", "architecture": "encoder",
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    },
    "google/vit-base-patch16-224": {
        "model_type": "vit", "architecture": "vision",
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "image_size": 224, "patch_size": 16, "num_channels": 3, "hidden_act": "gelu",
        "layer_norm_eps": 1e-12, "qkv_bias": True,
    },
}  # fmt: skip

ALIASES = {
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "gpt2": "openai-community/gpt2",
    "bert-base": "google-bert/bert-base-uncased",
    "bert-base-uncased": "google-bert/bert-base-uncased",
    "vit-b-16": "google/vit-base-patch16-224",
}
"""Short names."""
