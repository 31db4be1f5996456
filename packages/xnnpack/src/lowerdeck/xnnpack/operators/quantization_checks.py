"""Checks of quantisation operators: arguments that are invalid or contradict each other.

XNNPACK does not get most of these arguments, so it would return a result where eager raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.torch_base import arguments_of, describe_node
from lowerdeck.xnnpack.emit import fake
from lowerdeck.xnnpack.errors import QuantizationError
from lowerdeck.xnnpack.operators.quantization import QUANTIZATION, name_of

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)


def check_quantization(nodes: Iterable[Node]) -> None:
    """Check the arguments of all quantisation operators, delegated or not.

    Args:
        nodes: The calls of a program.

    Raises:
        QuantizationError: The least integer is above the largest, or beyond the type; the
            dtype of integers is not the declared one; blocks do not divide the sizes; a smallest
            scale is not a finite number.
    """
    for node in nodes:
        if name_of(node) in QUANTIZATION:
            args = arguments_of(node)
            _check_range(node, args)
            _check_integers(node, args)
            _check_blocks(node, args)
            _check_smallest(node, args)


def _said(args: Mapping[str, Any]) -> object:
    """Return the dtype that a call declares for its integers."""
    for name in ("input_dtype", "target_dtype", "dtype"):
        if name in args:
            return args[name]
    return args.get("output_dtype")


def _check_range(node: Node, args: Mapping[str, Any]) -> None:
    dtype = _said(args)
    if dtype not in _INTEGERS:
        return
    limits = torch.iinfo(dtype)
    low, high = args.get("quant_min"), args.get("quant_max")
    least = limits.min if low is None else low
    most = limits.max if high is None else high
    if not all(isinstance(limit, (int, float)) for limit in (least, most)):
        return  # tensors, or numbers that vary
    if not limits.min <= least < most <= limits.max:
        raise QuantizationError(
            f"found integers of {least} to {most} in {describe_node(node)}, expected a range "
            f"within the {limits.min} to {limits.max} of {dtype}"
        )


def _check_integers(node: Node, args: Mapping[str, Any]) -> None:
    source = args.get("input")
    if "dequantize" not in name_of(node) or not isinstance(source, Node):
        return
    stored, said = fake(source), _said(args)
    if stored is not None and said in _INTEGERS and stored.dtype != said:
        raise QuantizationError(
            f"found integers of {stored.dtype} where {describe_node(node)} says {said}; expected "
            "one type"
        )


def _check_blocks(node: Node, args: Mapping[str, Any]) -> None:
    block, source = args.get("block_size"), args.get("input")
    value = fake(source) if isinstance(source, Node) else None
    if not isinstance(block, Sequence) or value is None:
        return
    sizes = tuple(value.shape)
    fits = len(block) == len(sizes) and all(
        not isinstance(length, int)
        or (length > 0 and (not isinstance(size, int) or size % length == 0))
        for length, size in zip(block, sizes, strict=False)
    )
    if not fits:
        raise QuantizationError(
            f"found blocks of {list(block)} in {describe_node(node)}, which do not divide "
            f"{list(sizes)}"
        )


def _check_smallest(node: Node, args: Mapping[str, Any]) -> None:
    eps = args.get("eps")
    if isinstance(eps, float) and not (math.isfinite(eps) and eps >= 0):
        raise QuantizationError(
            f"found the smallest scale {eps} in {describe_node(node)}, expected a finite number"
        )
