"""The context of operator emitters: the call, and the payload under construction."""

from lowerdeck.xnnpack.emit.arguments import (
    Call,
    broadcast,
    fake,
    is_fixed,
    is_one,
    named,
    same_sizes,
    shape_of,
    symbols_refusal,
)
from lowerdeck.xnnpack.emit.computed import note_function
from lowerdeck.xnnpack.emit.emission import MOST_RESCALED, Emission
from lowerdeck.xnnpack.emit.regrouping import joined, reshape_refusal, resized
from lowerdeck.xnnpack.emit.scratch import Scratch, fits_half
from lowerdeck.xnnpack.emit.tensors import Quantized, Tracked
from lowerdeck.xnnpack.emit.tidying import tidy
from lowerdeck.xnnpack.emit.values import Fields, Range, float_of

__all__ = [
    "MOST_RESCALED",
    "Call",
    "Emission",
    "Fields",
    "Quantized",
    "Range",
    "Scratch",
    "Tracked",
    "broadcast",
    "fake",
    "fits_half",
    "float_of",
    "is_fixed",
    "is_one",
    "joined",
    "named",
    "note_function",
    "reshape_refusal",
    "resized",
    "same_sizes",
    "shape_of",
    "symbols_refusal",
    "tidy",
]
