"""Model programs at real sizes, a family to a file; what they are measured by is beside them (`measure`, `report`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # PyTorch is imported where programs are made
    from terrazzo.bench.programs.registry import Program

FAMILIES = (
    "language",
    "mixers",
    "serving",
    "multimodal",
    "vision",
    "backbones",
    "restoration",
    "imaging",
    "volumes",
    "detection",
    "diffusion",
    "audio",
    "recurrent",
    "series",
    "recommender",
    "graph",
    "science",
    "physics",
    "relations",
    "agents",
    "blocks",
    "sequences",
    "decisions",
    "training",
    "losses",
    "spaces",
    "samplers",
    "signals",
    "quantised",
    "derivatives",
    "rendering",
    "molecules",
    "probability",
    "memories",
    "robots",
    "solvers",
    "searches",
    "waves",
    "cells",
    "operators",
)


def programs() -> Mapping[str, Program]:
    """All programs by name, in the order of the families."""
    from importlib import import_module

    from terrazzo.bench.programs.registry import PROGRAMS

    for family in FAMILIES:
        import_module(f"terrazzo.bench.programs.{family}")
    order = {family: k for k, family in enumerate(FAMILIES)}
    return dict(sorted(PROGRAMS.programs.items(), key=lambda item: order[item[1].family]))
