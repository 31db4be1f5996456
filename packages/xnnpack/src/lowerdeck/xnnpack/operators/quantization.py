"""Quantise and dequantise nodes of PT2E and torchao."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cache

import torch
from torch.fx import Node

from lowerdeck.serializer import XnnEncoding
from lowerdeck.torch_base import arguments_of, describe_node
from lowerdeck.xnnpack.emit import Call, Emission, float_of
from lowerdeck.xnnpack.errors import QuantizationError
from lowerdeck.xnnpack.operators.contract import ASSERTION, INNER_TENSOR, Operator, Refusal
from lowerdeck.xnnpack.operators.rounding import rows_of, unrounded_reader
from lowerdeck.xnnpack.payload import int8

# By name, because the operators are registered when torchao or torch's quantisation is imported.
_PT2E = "quantized_decomposed."
QUANTIZE = f"{_PT2E}quantize_per_tensor.default"
DEQUANTIZE = f"{_PT2E}dequantize_per_tensor.default"
_CHOOSE = (
    f"{_PT2E}choose_qparams.tensor",
    f"{_PT2E}choose_qparams_per_token_asymmetric.default",
    "torchao.choose_qparams_affine.default",
)
_ROUND = (
    f"{_PT2E}quantize_per_tensor.tensor",
    f"{_PT2E}quantize_per_token.default",
    "torchao.quantize_affine.default",
)
_UNROUND = (
    f"{_PT2E}dequantize_per_tensor.tensor",
    f"{_PT2E}dequantize_per_token.default",
    "torchao.dequantize_affine.default",
)
WEIGHTS = (
    DEQUANTIZE,
    f"{_PT2E}dequantize_per_channel.default",
    f"{_PT2E}dequantize_per_channel_group.default",
    "torchao.dequantize_affine.default",
)
"""The operators that dequantise weights."""
_LEAST_SCALE = float(torch.finfo(torch.float32).tiny)


def name_of(node: Node) -> str:
    """Return the name of the operator that a node calls, such as ``"aten.add.Tensor"``."""
    return _text(node.target) if node.op == "call_function" else ""


_text = cache(str)
"""Cached, because an operator formats its name for each ``str``."""


def is_dynamic(node: Node) -> bool:
    """Return whether a node belongs to a chain of dynamic quantisation."""
    name = name_of(node)
    if name in _CHOOSE or name in _ROUND[:2] or name in _UNROUND[:2]:
        return True
    scale = node.args[2] if name in (_ROUND[2], _UNROUND[2]) else None
    return isinstance(scale, Node) and name_of(chosen_by(scale)) in _CHOOSE


def chosen_by(scale: Node) -> Node:
    """Return the node that chooses a dynamic scale, skipping a getitem."""
    source = scale.args[0] if scale.op == "call_function" and scale.args else None
    return source if isinstance(source, Node) else scale


def is_constant_source(node: object, constants: Collection[str]) -> bool:
    """Return whether a node is a constant, or a part of a constant of several tensors."""
    if isinstance(node, Node) and name_of(node) == INNER_TENSOR:
        node = node.args[0]
    return isinstance(node, Node) and node.op == "placeholder" and node.name in constants


def is_weight(node: Node, constants: Collection[str]) -> bool:
    """Return whether a node dequantises constant weights."""
    return name_of(node) in WEIGHTS and is_constant_source(node.args[0], constants)


def static_encoding(node: Node) -> XnnEncoding:
    """Return the encoding that a node quantises to, or dequantises from.

    Raises:
        QuantizationError: Its scale or its zero point is invalid.
    """
    args = arguments_of(node)
    scale, zero_point = args["scale"], args["zero_point"]
    if not isinstance(scale, (int, float)) or not is_scale(float(scale)):
        raise QuantizationError(
            f"found the scale {scale} of {describe_node(node)}, expected a positive, normal number"
        )
    if not isinstance(zero_point, int) or not -128 <= zero_point <= 127:
        raise QuantizationError(
            f"found the zero point {zero_point} of {describe_node(node)}, expected -128 to 127"
        )
    return int8(float_of(float(scale)), zero_point)


def is_scale(number: float) -> bool:
    """Return whether a scale is valid: positive, finite and not denormal."""
    return math.isfinite(number) and number >= _LEAST_SCALE and math.isfinite(float_of(number))


def _range_refusal(call: Call) -> str | None:
    args = call.args
    if args["dtype"] != torch.int8:
        return f"it quantises to {args['dtype']} where int8 is needed"
    if (args["quant_min"], args["quant_max"]) != (-128, 127):
        return f"its integers are {args['quant_min']} to {args['quant_max']}, not -128 to 127"
    return None


def _quantize(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["input"])
    emission.define(call.node, emission.in_encoding(tracked, static_encoding(call.node)))


def _quantize_refusal(call: Call) -> str | None:
    reason = _range_refusal(call)
    if reason is None:
        static_encoding(call.node)
    return reason


def _dequantize(emission: Emission, call: Call) -> None:
    emission.define(call.node, emission.of(call.args["input"]))


def _dequantize_refusal(call: Call) -> str | None:
    source = call.args["input"]
    if is_constant_source(source, call.constants):
        return None
    if call.args["dtype"] != torch.int8:
        return f"it dequantises {call.args['dtype']} where int8 is needed"
    encoding = static_encoding(call.node)
    others = [source] if name_of(source) == QUANTIZE else []
    # Comparing each with the first is enough, and linear for thousands of readers.
    others.append(next(user for user in source.users if name_of(user) == DEQUANTIZE))
    for other in others:
        if static_encoding(other) != encoding:
            raise QuantizationError(
                f"{describe_node(call.node)} reads {source.name} with another scale or zero point "
                f"than {other.name}; expected one pair for each tensor"
            )
    return None


def _emit_nothing(emission: Emission, call: Call) -> None:
    """Emit nothing for scales chosen at run time: the runtime computes them."""


def _choose_refusal(call: Call) -> str | None:
    args = call.args
    kind = str(args.get("mapping_type", "ASYMMETRIC"))
    # The runtime's asymmetric per-row scales are never coarser than these.
    if kind not in ("ASYMMETRIC", "SYMMETRIC"):
        return f"its scales have the mapping type {kind}; the runtime's are asymmetric"
    block = args.get("block_size")
    shape = call.shape("input")
    if block is not None and str(block[-1]) != str(shape[-1]):
        return f"its blocks are {list(block)}; the runtime computes one scale per row"
    low, high = args.get("quant_min"), args.get("quant_max")
    # Seven bits, which prevent overflow of accumulators on some processors, are not needed here.
    if (low, high) not in ((-128, 127), (-64, 63), (None, None)):
        return f"its integers are {low} to {high}, not -128 to 127 or -64 to 63"
    for read in call.node.users:
        others = (user for user in read.users if user.target is not ASSERTION)
        if any(name_of(user) not in (*_ROUND, *_UNROUND) for user in others):
            return "its scales are used for more than quantising and dequantising"
    return _unrounded(call)


def unrounded(node: Node, is_multiplied: Callable[[Node], bool]) -> str | None:
    """Return why dynamically quantised rows cannot stay quantised for their users, or None.

    Args:
        node: A node of a chain of dynamic quantisation.
        is_multiplied: Whether a node dequantises weights that the runtime multiplies as integers.
    """
    reader = unrounded_reader(node, (*_ROUND, *_UNROUND), is_multiplied)
    if reader is None:
        return None
    return (
        f"{reader.name} reads the rows, and the runtime quantises rows only inside integer layers"
    )


def _unrounded(call: Call) -> str | None:
    return unrounded(call.node, lambda node: is_weight(node, call.constants))


def reads_rounded_rows(layer: Node) -> bool:
    """Return whether the input rows of a layer are dynamically quantised."""
    return is_dynamic(rows_of(layer))


def _round(emission: Emission, call: Call) -> None:
    emission.define(call.node, emission.of(call.args["input"]))


def _round_refusal(call: Call) -> str | None:
    name = "output_dtype" if "output_dtype" in call.args else "dtype"
    if call.args.get(name, torch.int8) != torch.int8:
        return f"it quantises to {call.args[name]} where int8 is needed"
    if not is_dynamic(call.node):
        return "its scales are neither numbers nor the result of a choose_qparams call"
    chosen = chosen_by(call.args["scale" if "scale" in call.args else "scales"])
    limits = _range_of(arguments_of(chosen)) if name_of(chosen) in _CHOOSE else (-128, 127)
    if _range_of(call.args) != limits:
        low, high = _range_of(call.args)
        return (
            f"its integers are {low} to {high}, but its scales are for {limits[0]} to {limits[1]}"
        )
    return _unrounded(call)


def _range_of(args: Mapping[str, object]) -> tuple[object, object]:
    """Return the least and the largest integer that a call of the chain returns."""
    low, high = args.get("quant_min"), args.get("quant_max")
    return -128 if low is None else low, 127 if high is None else high


def _unround_refusal(call: Call) -> str | None:
    source = call.args["input"]
    if is_constant_source(source, call.constants):
        constant = all(call.is_weight(node) for node in call.node.all_input_nodes)
        return None if constant else "its scales are not constant"
    if name_of(source) not in _ROUND:
        return "it dequantises integers that no node of the program quantised"
    if not is_dynamic(call.node):
        return "its scales are neither numbers nor the result of a choose_qparams call"
    for names in (("scale", "scales"), ("zero_point", "zero_points"), ("block_size",)):
        if _one_of(call.args, names) != _one_of(arguments_of(source), names):
            return f"its {names[0]} is not the one that {source.name} quantised with"
    return _unrounded(call)


def _one_of(args: Mapping[str, object], names: tuple[str, ...]) -> object:
    return next((args[name] for name in names if name in args), None)


def _constant_refusal(reason: str, name: str = "") -> Refusal:
    def refusal(call: Call) -> str | None:
        source = call.args[name] if name else call.node
        return None if is_constant_source(source, call.constants) else reason

    return refusal


_ROUNDING = Operator(_round, _round_refusal, computes=False)
_UNROUNDING = Operator(_round, _unround_refusal, computes=False)
_WEIGHT = Operator(
    _emit_nothing, _constant_refusal("its integers are not constant", "input"), computes=False
)
_INNER = Operator(
    _emit_nothing,
    _constant_refusal("it reads a part of a tensor that is not constant"),
    computes=False,
)
QUANTIZATION: Mapping[str, Operator] = {
    QUANTIZE: Operator(_quantize, _quantize_refusal),
    DEQUANTIZE: Operator(_dequantize, _dequantize_refusal),
    INNER_TENSOR: _INNER,
    **dict.fromkeys(_CHOOSE, Operator(_emit_nothing, _choose_refusal, computes=False)),
    **dict.fromkeys(_ROUND, _ROUNDING),
    **dict.fromkeys(WEIGHTS[1:3], _WEIGHT),
    **dict.fromkeys(_UNROUND, _UNROUNDING),
}
"""Emitters by the names of their operators."""
