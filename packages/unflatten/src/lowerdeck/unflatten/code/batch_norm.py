"""Batch normalisation of decomposed programs, in a form that trains.

Its gradient keeps the running statistics that it read. The program overwrites them right after,
as eager does, and autograd then refuses to go back through what was overwritten.
"""

from __future__ import annotations

from typing import Any

import torch

BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default


def batch_norm(
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    *options: Any,
) -> Any:
    """Run ``BATCH_NORM`` on copies of the running statistics.

    Args:
        value: What to normalise.
        weight: The scale of each channel, or None.
        bias: The shift of each channel, or None.
        running_mean: The mean of each channel so far.
        running_var: The variance of each channel so far.
        options: Whether to train, the momentum and epsilon.
    """
    return BATCH_NORM(value, weight, bias, running_mean.clone(), running_var.clone(), *options)
