"""Models of pictures and text together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from terrazzo.bench.programs.huggingface import TINY, other, tokens
from terrazzo.bench.programs.registry import normal


def captioned(count: int, length: int, size: int) -> Mapping[str, Tensor]:
    """Pictures, each with a text."""
    return {"input_ids": tokens(count, length), "pixel_values": normal(count, 3, size, size)}


def parts(layers: int = 2, **tiny: Any) -> dict[str, Any]:
    """The configurations of both halves."""
    vision = {"image_size": 64, "patch_size": 16} if tiny else {}
    given = {"num_hidden_layers": layers, **tiny}
    return {"text_config": given, "vision_config": {**given, **vision}}


other("clip", "multimodal", "CLIPModel", captioned, (16, 77, 224), (2, 16, 64), parts(**TINY), training=True, **parts())
other("siglip_pair", "multimodal", "SiglipModel", captioned, (16, 64, 224), (2, 16, 64), parts(**TINY), **parts())
other("chinese_clip", "multimodal", "ChineseCLIPModel", captioned, (16, 52, 224), (2, 16, 64), parts(**TINY), **parts())
other(
    "blip",
    "multimodal",
    "BlipForConditionalGeneration",
    captioned,
    (8, 32, 384),
    (2, 8, 64),
    parts(**TINY),
    **parts(),
    pick=lambda out: out.logits,
)
other(
    "perceiver",
    "multimodal",
    "PerceiverModel",
    lambda count, length, width: {"inputs": normal(count, length, width)},
    (2, 1024, 768),
    (1, 16, 32),
    {"d_model": 32, "d_latents": 32, "num_latents": 8},
    num_blocks=1,
    num_self_attends_per_block=2,
)
other(
    "lxmert",
    "multimodal",
    "LxmertModel",
    lambda count, length, boxes, features: {
        "input_ids": tokens(count, length),
        "visual_feats": normal(count, boxes, features),
        "visual_pos": normal(count, boxes, 4),
    },
    (16, 64, 36, 2048),
    (2, 8, 4, 2048),
    TINY,
    l_layers=1,
    x_layers=1,
    r_layers=1,
)
other(
    "layoutlm",
    "multimodal",
    "LayoutLMModel",
    lambda count, length: {
        "input_ids": tokens(count, length),
        "bbox": tokens(count, length)[..., None].repeat(1, 1, 4),
    },
    (8, 512),
    (2, 16),
    TINY,
    training=True,
    num_hidden_layers=2,
)
