"""Sets of dtypes that operators support."""

import torch

FLOATS = frozenset({torch.float32, torch.float16})
# OpenVINO computes int64 as int32 on processors, which suffices for positions but not for sums.
NUMBERS = FLOATS | {torch.int32}
VALUES = NUMBERS | {torch.bool, torch.int8, torch.uint8}
WITH_POSITIONS = NUMBERS | {torch.int64}
