"""Models of transformers as programs: from their configurations, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from terrazzo.bench.programs.registry import DTYPES, Made, declare, normal, whole

TINY: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
"""What most small configurations have in common."""
TINY_DECODER: dict[str, Any] = {**TINY, "num_key_value_heads": 2, "vocab_size": 128}
WORDS = 100
"""Tokens are drawn from so many; all vocabularies are larger."""


class Named(nn.Module):
    """A model of transformers as a module that is called by position; `pick` says what of its output is the result."""

    def __init__(self, model: nn.Module, names: Sequence[str], pick: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.model, self.names, self.pick = model, names, pick

    def forward(self, *tensors: Tensor) -> Any:
        output = self.model(**dict(zip(self.names, tensors, strict=True)))
        return self.pick(output) if self.pick else output[0]


def build(
    kind: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
    pick: Callable[[Any], Any] | None = None,
    attention: str = "sdpa",
) -> Made:
    """A model of this class, and its inputs by their names."""
    import transformers

    model_class = getattr(transformers, kind)
    made = model_class.config_class(**config)
    made._attn_implementation = attention
    try:
        model = model_class(made)
    except ValueError:  # it has no such attention
        made._attn_implementation = "eager"
        model = model_class(made)
    return Named(model, tuple(inputs), pick), *inputs.values()


def language(
    name: str,
    kind: str,
    size: tuple[int, int],
    tiny: Mapping[str, Any],
    *,
    decoder: int = 0,
    attention: str = "sdpa",
    training: bool = False,
    dtypes: Sequence[str] = tuple(DTYPES),
    short: tuple[int, int] = (2, 32),
    **config: Any,
) -> None:
    """Declares a model of `size` sequences of tokens; with `decoder`, a second one of so many tokens."""

    def make(size: tuple[int, int] = size, decoder: int = decoder, **smaller: Any) -> Made:
        inputs = {"input_ids": 1 + whole(WORDS, *size)}
        if decoder:
            inputs["decoder_input_ids"] = 1 + whole(WORDS, size[0], decoder)
        return build(kind, {**config, **smaller}, inputs, attention=attention)

    small = {"size": short, **({"decoder": 16} if decoder else {}), **tiny}
    declare(name, "language", make, small, training, dtypes)


def pictures(
    name: str,
    kind: str,
    size: tuple[int, int],
    tiny: Mapping[str, Any],
    *,
    family: str = "vision",
    short: tuple[int, int] = (2, 64),
    channels: int = 3,
    training: bool = False,
    attention: str = "sdpa",
    pick: Callable[[Any], Any] | None = None,
    dtypes: Sequence[str] = tuple(DTYPES),
    **config: Any,
) -> None:
    """Declares a model of `size`: so many pictures, so large."""

    def make(size: tuple[int, int] = size, **smaller: Any) -> Made:
        count, edge = size
        inputs = {"pixel_values": normal(count, channels, edge, edge)}
        return build(kind, {**config, **smaller}, inputs, pick, attention)

    declare(name, family, make, {"size": short, **tiny}, training, dtypes)


def other(
    name: str,
    family: str,
    kind: str,
    given: Callable[..., Mapping[str, Tensor]],
    sizes: Sequence[Any],
    short: Sequence[Any],
    tiny: Mapping[str, Any],
    *,
    training: bool = False,
    attention: str = "sdpa",
    pick: Callable[[Any], Any] | None = None,
    dtypes: Sequence[str] = tuple(DTYPES),
    **config: Any,
) -> None:
    """Declares a model of inputs that `given` makes of `sizes`, or of the `short` ones."""

    def make(sizes: Sequence[Any] = sizes, **smaller: Any) -> Made:
        return build(kind, {**config, **smaller}, given(*sizes), pick, attention)

    declare(name, family, make, {"sizes": short, **tiny}, training, dtypes)


def tokens(count: int, length: int) -> Tensor:
    """Sequences of tokens, none of them the one that pads."""
    return 1 + whole(WORDS, count, length)
