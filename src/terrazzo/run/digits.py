"""Which convolutions in float32 cuDNN computes in TF32, where PyTorch lets it: it is asked, on numbers that tell.

cuDNN chooses among its kernels by rules of its own, which no rule of ours repeats for all sizes: of large convolutions
with 32 channels and more 6 % keep the digits of float32, of those with few channels about half. A number with one bit
more than TF32 has is rounded to 1 there. So sums of such numbers, of either sign, are whole numbers in TF32 and hardly
ever in float32, whatever the kernel does. What was said is kept in the cache.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from terrazzo.ir.types import Type
from terrazzo.rules.torch_to_tensor.families import FORWARD, convolved
from terrazzo.run.cache import Cache, digest

JUST_ABOVE_ONE = 1 + 2**-12
"""TF32 has 10 bits behind the point."""
LOOKED_AT = 1 << 20
"""Numbers of a result that are looked at."""
ROOM = 0.5
"""The part of free memory that asking may take; what needs more is not asked."""


@dataclass
class CuDNN:
    """The library of a GPU, by its index; what it said once is known."""

    index: int
    cache: Cache
    said: dict[str, tuple[bool, ...]] = field(default_factory=dict)

    def rough(self, op: Any) -> tuple[bool, ...]:
        """Which results of a convolution, or of its gradients, are in TF32; nothing where there is no telling."""
        import torch

        laid = [(x.type.static_shape, x.type.element_strides) for x in op.children]
        where = torch.__version__, torch.cuda.get_device_name(self.index)
        rest = [a for a in op.args if not hasattr(a, "type")]
        key = digest("digits", repr((op.name, laid, rest, library(), where)))
        if key not in self.said:
            self.said[key] = self._kept(key) or self._asked(op, key)
        return self.said[key]

    def _kept(self, key: str) -> tuple[bool, ...]:
        """What the cache has; nothing where it has none, or no such thing."""
        if (path := self.cache.get(key, ".digits")) is None:
            return ()
        try:
            found = json.loads(path.read_bytes())
        except (ValueError, OSError):
            return ()
        return tuple(found) if isinstance(found, list) and all(isinstance(x, bool) for x in found) else ()

    def _asked(self, op: Any, key: str) -> tuple[bool, ...]:
        import torch

        results = op.result if isinstance(op.result, tuple) else (op.result,)
        kinds: list[Type] = [*(x.type for x in op.children), *filter(None, results)]
        device = torch.device("cuda", self.index)
        free, _ = torch.cuda.mem_get_info(device)
        if sum(math.prod(k.static_shape) * k.dtype.size for k in kinds) > ROOM * free:
            return ()
        try:
            found = answered(op, device)
        except RuntimeError:  # out of memory, or an op that PyTorch refuses: it will say so itself
            return ()
        self.cache.put(key, ".digits", json.dumps(found).encode())
        return found


def library() -> tuple[Any, ...]:
    """The library's version, and the switches by which it chooses."""
    from torch.backends import cudnn

    return cudnn.version(), cudnn.benchmark, cudnn.deterministic


def answered(op: Any, device: Any) -> tuple[bool, ...]:
    """For each result of a convolution, or of its gradients, whether it is in TF32 on a device. Neither what PyTorch
    draws next nor what it does to ops around, such as autocast, is touched.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    def filled(x: Any, told: bool) -> Any:
        kind: Type = x.type
        made = torch.empty_strided(kind.static_shape, kind.element_strides, dtype=torch.float32, device=device)
        if not told:
            return made.fill_(1)
        draw = torch.Generator(device).manual_seed(0)
        return made.bernoulli_(generator=draw).mul_(2).sub_(1).mul_(JUST_ABOVE_ONE)

    with _disable_current_modes(), torch.no_grad(), torch.autocast("cuda", enabled=False):
        image, weights, _, *how = convolved(op)
        if op.name == FORWARD:
            made = [torch.ops.aten.convolution(filled(image, True), filled(weights, False), None, *how)]
        else:
            given = filled(op.args[0], True), filled(image, False), filled(weights, False)
            mask = [*op.args[-1][:2], False]
            made = torch.ops.aten.convolution_backward(*given, None, *how, mask)
        return tuple(x is not None and is_whole(x) for x in made)


def is_whole(x: Any) -> bool:
    """Whether some of the numbers of a tensor, as they lie in memory, are all whole."""
    some = x.as_strided((min(x.numel(), LOOKED_AT),), (1,))
    return bool((some == some.round()).all())
