"""Sets of dtypes that operators support."""

import torch

FLOATS = frozenset({torch.float32, torch.float16})
# OpenVINO computes int64 as int32 on CPUs, which suffices for indices but not for sums.
NUMBERS = FLOATS | {torch.int32}
VALUES = NUMBERS | {torch.bool, torch.int8, torch.uint8}
WITH_INDICES = NUMBERS | {torch.int64}
