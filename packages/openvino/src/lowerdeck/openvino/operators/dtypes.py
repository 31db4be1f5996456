"""Dtypes that operators are taken in."""

import torch

FLOATS = frozenset({torch.float32, torch.float16})
# 64-bit integers become 32-bit ones on OpenVINO's processors: good for positions, not for sums.
NUMBERS = FLOATS | {torch.int32}
VALUES = NUMBERS | {torch.bool, torch.int8, torch.uint8}
WITH_POSITIONS = NUMBERS | {torch.int64}
