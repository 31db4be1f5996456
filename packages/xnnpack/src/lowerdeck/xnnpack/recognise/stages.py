"""All that is recognised."""

from __future__ import annotations

from lowerdeck.xnnpack.recognise.attention import ATTENTION, GROUPS
from lowerdeck.xnnpack.recognise.functions import FUNCTIONS, NORMS
from lowerdeck.xnnpack.recognise.integer_layers import INTEGER_LAYERS
from lowerdeck.xnnpack.recognise.movements import JOINS, SHUFFLES
from lowerdeck.xnnpack.recognise.pieces import Whole
from lowerdeck.xnnpack.recognise.products import LAYERS, PRODUCTS

STAGES: tuple[tuple[Whole, ...], ...] = (
    INTEGER_LAYERS,
    (*PRODUCTS, *FUNCTIONS, *NORMS, *SHUFFLES, *JOINS),
    (*LAYERS, *ATTENTION),
    GROUPS,
)
"""What is recognised, in order: later ones are made of what earlier ones found."""
