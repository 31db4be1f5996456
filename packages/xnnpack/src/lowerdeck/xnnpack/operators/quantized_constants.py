"""Constant folding of quantised weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.torch_base import arguments_of, describe_node
from lowerdeck.xnnpack.emit import Quantized, named
from lowerdeck.xnnpack.errors import QuantizationError
from lowerdeck.xnnpack.operators.quantization import DEQUANTIZE, WEIGHTS, name_of
from lowerdeck.xnnpack.operators.shapes import order_of

_aten = torch.ops.aten
_LEAST_SCALE = torch.finfo(torch.float32).tiny
Reader = Callable[[object], torch.Tensor]


def dequantized_constant(node: Node, read: Reader) -> Quantized | None:
    """Return the quantised constant that a node dequantises.

    Args:
        node: A node with constant inputs.
        read: Returns the data of a constant argument.

    Returns:
        The integers with their scales; None for other nodes, and for integers that are not
        8-bit.

    Raises:
        QuantizationError: Scales, zero points or integers are invalid.
    """
    name = name_of(node)
    if name not in WEIGHTS:
        return None
    args = arguments_of(node)
    data = read(args["input"])
    if data.dtype != torch.int8:
        return None
    bits = stored_bits(args)
    if name == DEQUANTIZE:
        scales, zeros = torch.tensor([args["scale"]]), torch.tensor([args["zero_point"]])
        quantized = Quantized(data, scales, zeros, None, 0, bits)
    else:
        quantized = _with_scales(node, args, data, bits, read)
    _check(node, quantized)
    return quantized


def stored_bits(args: Mapping[str, Any]) -> int:
    """Return the bits per integer of a weight that the program declares: 4 or 8.

    Args:
        args: Arguments of its dequantise node.
    """
    low, high = args.get("quant_min"), args.get("quant_max")
    return 4 if low is not None and high is not None and low >= -8 and high <= 7 else 8


def _with_scales(
    node: Node, args: dict[str, object], data: torch.Tensor, bits: int, read: Reader
) -> Quantized:
    scales = read(args["scale"] if "scale" in args else args["scales"]).float()
    offsets = args["zero_point"] if "zero_point" in args else args["zero_points"]
    zeros = torch.zeros_like(scales) if offsets is None else read(offsets)
    block = args.get("block_size")
    if isinstance(block, (list, tuple)):
        return _of_blocks(node, data, [int(length) for length in block], scales, zeros, bits)
    if "group_size" in args:
        group = int(args["group_size"])  # type: ignore[call-overload]  # a number by its schema
        if data.dim() != 2 or group < 1 or data.shape[1] % group:
            raise QuantizationError(
                f"found groups of {group} for the shape {list(data.shape)} in "
                f"{describe_node(node)}, expected a matrix with rows of whole groups"
            )
        return Quantized(data, scales, zeros, None, group, bits)
    axis = int(args["axis"])  # type: ignore[call-overload]  # a number by its schema
    if not -data.dim() <= axis < data.dim() or scales.numel() != data.shape[axis]:
        count = scales.numel()
        # A single scale may be that of an observer that never ran.
        cure = (
            ". Where PT2E made it: call what prepare_pt2e returned, with any inputs if quantised "
            "dynamically, before convert_pt2e"
        )
        raise QuantizationError(
            f"found {count} scale{'' if count == 1 else 's'} along dimension {axis} of "
            f"{list(data.shape)} in {describe_node(node)}, expected one for each channel"
            f"{cure if count == 1 else ''}"
        )
    flat = zeros.reshape(-1)
    return Quantized(data, scales.reshape(-1), flat, axis % data.dim(), 0, bits)


def _of_blocks(
    node: Node,
    data: torch.Tensor,
    block: Sequence[int],
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
) -> Quantized:
    sizes = list(data.shape)
    if len(block) != len(sizes) or any(
        length < 1 or size % length for length, size in zip(block, sizes, strict=True)
    ):
        raise QuantizationError(
            f"found a block size of {list(block)} in {describe_node(node)}, expected a divisor of "
            f"the shape {sizes}"
        )
    counts = [size // length for size, length in zip(sizes, block, strict=True)]
    many = [axis for axis, count in enumerate(counts) if count > 1]
    flat, zero = scales.reshape(-1), zeros.reshape(-1)
    if len(many) <= 1 and not (many and block[many[0]] > 1):
        # One row, or one group per row: per-channel scales.
        axis = many[0] if many else None
        return Quantized(data, flat, zero, axis, 0, bits)
    if len(sizes) == 2 and block[0] == 1:
        shape = (sizes[0], counts[1])
        return Quantized(data, scales.reshape(shape), zeros.reshape(shape), None, block[1], bits)
    raise QuantizationError(
        f"found blocks of {list(block)} for shape {sizes} in {describe_node(node)}, expected one "
        "scale for each tensor, channel, or group along the last dimension of a matrix"
    )


def _check(node: Node, quantized: Quantized) -> None:
    needed = (
        quantized.data.numel() // quantized.group if quantized.group else quantized.scales.numel()
    )
    if quantized.scales.numel() != needed or quantized.zero_points.numel() not in (needed, 1):
        raise QuantizationError(
            f"found {quantized.scales.numel()} scales and {quantized.zero_points.numel()} zero "
            f"points in {describe_node(node)}, expected {needed}"
        )
    if quantized.bits == 4 and quantized.data.numel():
        low, high = map(int, quantized.data.aminmax())
        # torch ignores the limits when it dequantises, but 4 bits cannot store larger integers.
        if low < -8 or high > 7:
            raise QuantizationError(
                f"found integers of {low} to {high} in {describe_node(node)}, expected -8 "
                "to 7, because the declared limits are those of 4 bits"
            )
    zeros = quantized.zero_points
    if zeros.is_floating_point() and bool((zeros != zeros.round()).any()):
        raise QuantizationError(
            f"found zero points that are not integers in {describe_node(node)}, expected "
            "integers, which the runtime needs"
        )
    # aminmax propagates NaN.
    for wrong in map(float, quantized.scales.aminmax()) if needed else ():
        if not (wrong >= _LEAST_SCALE and math.isfinite(wrong)):
            raise QuantizationError(
                f"found the scale {wrong} in {describe_node(node)}, expected positive, normal "
                "numbers"
            )


_PERMUTATIONS = frozenset(
    named("permute permute_copy t t_copy transpose.int transpose_copy.int numpy_T mT")
)


def permuted_constant(node: Node, source: Quantized) -> Quantized | None:
    """Return constant integers as permuted by a node, or None if it is not a permutation."""
    if node.target in _PERMUTATIONS:
        return source.permuted(order_of(node))
    if node.target in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
        return source
    return None
