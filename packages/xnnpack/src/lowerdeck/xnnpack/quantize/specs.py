"""Quantisation specs of torchao that match the integer kernels of XNNPACK."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torchao.quantization import pt2e
from torchao.quantization.pt2e.quantizer import QuantizationSpec

# Keeps scales normal numbers if all observed values are 0. Same value as in ExecuTorch.
_SMALLEST_SCALE = 2**-12


class Specs(NamedTuple):
    """Quantisation specs of the tensors at a quantised operator.

    Attributes:
        activation: Spec of the inputs of an operator.
        output: Spec of the output of an operator; None for float.
        weight: Spec of the weights of a layer, with output channels in dimension 0.
        transposed_weight: Spec of the weights of a transposed convolution, with output channels in
            dimension 1.
        dynamic: Whether the scales of activations are chosen at run time.
        qat: Whether the program is trained further.
    """

    activation: Any
    output: Any
    weight: Any
    transposed_weight: Any
    dynamic: bool
    qat: bool


def specs_for(*, per_channel: bool, dynamic: bool, qat: bool, weight_bits: int) -> Specs:
    """Return the specs for the settings of ``XnnpackQuantizer``."""
    activation = QuantizationSpec(
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
        is_dynamic=dynamic,
        observer_or_fake_quant_ctr=_activation_observer(dynamic=dynamic, qat=qat),
    )
    largest = 2 ** (weight_bits - 1) - 1
    weight = QuantizationSpec(
        dtype=torch.int8,
        # Symmetric, as XNNPACK needs; 4 bits use all sixteen values.
        quant_min=-largest if weight_bits == 8 else -largest - 1,
        quant_max=largest,
        qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
        ch_axis=0,
        is_dynamic=False,
        observer_or_fake_quant_ctr=_weight_observer(per_channel=per_channel, qat=qat),
    )
    output = None if dynamic else activation
    return Specs(activation, output, weight, replace(weight, ch_axis=1), dynamic, qat)


def _activation_observer(*, dynamic: bool, qat: bool) -> Any:
    if qat and dynamic:
        last_seen = pt2e.MovingAverageMinMaxObserver.with_args(averaging_constant=1)
        return pt2e.FakeQuantize.with_args(eps=_SMALLEST_SCALE, observer=last_seen)
    if qat:
        return pt2e.FusedMovingAvgObsFakeQuantize.with_args(eps=_SMALLEST_SCALE)
    kind = pt2e.PlaceholderObserver if dynamic else pt2e.HistogramObserver
    return kind.with_args(eps=_SMALLEST_SCALE)


def _weight_observer(*, per_channel: bool, qat: bool) -> Any:
    if qat:
        observer_kind = (
            pt2e.MovingAveragePerChannelMinMaxObserver
            if per_channel
            else pt2e.MovingAverageMinMaxObserver
        )
        return pt2e.FusedMovingAvgObsFakeQuantize.with_args(
            eps=_SMALLEST_SCALE, observer=observer_kind
        )
    kind = pt2e.PerChannelMinMaxObserver if per_channel else pt2e.MinMaxObserver
    return kind.with_args(eps=_SMALLEST_SCALE)
