"""What PyTorch's fast paths of attention and of encoder layers compute, which are one op each where nobody wants
gradients (ATen's native/transformers/attention.cpp and transformer.cpp): by definition, so that kernels are derived.
"""

from __future__ import annotations

from typing import Any

KEYS = 1
"""The type of a mask of sequences and keys. Others have queries and keys, perhaps of sequences and heads."""


def attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim: int,
    heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """`aten._native_multi_head_attention` of [sequences, tokens, embed_dim]: the result and, if asked, the weights of
    all heads or their mean. Where `mask` is True no weight is.
    """
    from torch.nn.functional import linear

    if any(x.is_nested for x in (query, key, value)):
        return NotImplemented
    parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (linear(x, w, b).unflatten(-1, (heads, -1)).transpose(1, 2) for x, w, b in parts)
    scores = (q * (embed_dim // heads) ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        mask = mask.bool()
        mask = mask[:, None, None, :] if mask_type == KEYS else mask
        scores = scores.masked_fill(mask, float("-inf"))
    weights = scores.softmax(-1)
    found = linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return found, query.new_empty(0)
    return found, weights.mean(1) if average_attn_weights else weights


def encoder_layer(
    src: Any,
    embed_dim: int,
    heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> Any:
    """`aten._transformer_encoder_layer_fwd` of [sequences, tokens, embed_dim]."""
    from torch.nn.functional import gelu, layer_norm, linear, relu

    if src.is_nested:
        return NotImplemented

    def attended(x: Any) -> Any:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return attention(x, x, x, embed_dim, heads, *weights, mask, False, True, mask_type)[0]

    def fed_forward(x: Any) -> Any:
        return linear((gelu if use_gelu else relu)(linear(x, ffn_weight_1, ffn_bias_1)), ffn_weight_2, ffn_bias_2)

    x = src
    norms = (norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2)
    for part, norm in zip((attended, fed_forward), norms, strict=True):
        if norm_first:
            x = x + part(layer_norm(x, (embed_dim,), *norm, eps))
        else:
            x = layer_norm(x + part(x), (embed_dim,), *norm, eps)
    return x
