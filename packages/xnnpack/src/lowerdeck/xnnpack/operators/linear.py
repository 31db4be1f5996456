"""Matrix products: linear layers, and products of batches of matrices."""

from __future__ import annotations

import torch
from torch.fx import Node

from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit.arguments import Call, shape_of
from lowerdeck.xnnpack.emit.emission import Emission
from lowerdeck.xnnpack.operators.batch_norm import Affine, following_batch_norm
from lowerdeck.xnnpack.operators.clamps import following_clamp
from lowerdeck.xnnpack.operators.contract import Operator, Table
from lowerdeck.xnnpack.payload.schema import NONE, TRANSPOSE_WEIGHTS, NodeKind

_aten = torch.ops.aten


def _fully_connected(
    emission: Emission, node: Node, source: Node, filters: Node, bias: Node | None, flags: int
) -> None:
    """Add ``source x filters + bias``; the filters are [N, K], or [K, N] with the flag."""
    constants = [emission.of(one).tensor is not None for one in (filters, bias) if one is not None]
    affine = None
    if all(constants) and len(shape_of(node)) == 2:
        affine = following_batch_norm(node, emission)
    last, limits = following_clamp(node if affine is None else affine.last)
    shape = shape_of(last)
    # The runtime frees what is constant of the two after the first packing, and packs again at
    # every call if the other is computed: a file that is mapped from a path dies of it.
    apart = bias is not None and len(set(constants)) > 1
    filter_id, bias_id = _weights(emission, filters, None if apart else bias, flags, affine)
    value = emission.add(
        NodeKind.FULLY_CONNECTED,
        shape,
        output_range=None if apart else limits,
        input1_id=emission.id_of(emission.of(source)),
        filter_id=filter_id,
        bias_id=bias_id,
        flags=flags,
    )
    if bias is not None and apart:
        value = emission.add(
            NodeKind.ADD,
            shape,
            output_range=limits,
            input1_id=value,
            input2_id=emission.id_of(emission.of(bias)),
        )
    emission.define_value(last, value)


def _weights(
    emission: Emission, filters: Node, bias: Node | None, flags: int, affine: Affine | None
) -> tuple[int, int]:
    if affine is None:
        bias_id = NONE if bias is None else _packed(emission, bias, flat=True)
        return _packed(emission, filters), bias_id
    scale = affine.scale if flags else affine.scale.unsqueeze(1)
    folded = (emission.constant(filters).double() * scale).float()
    shift = affine.shift
    if bias is not None:
        shift = shift + emission.constant(bias).reshape(-1).double() * affine.scale
    return (
        emission.constant_value(folded, packed=True),
        emission.constant_value(shift.float(), packed=True),
    )


def _packed(emission: Emission, node: Node, *, flat: bool = False) -> int:
    tracked = emission.of(node)
    if tracked.tensor is None:
        return emission.id_of(tracked)
    tensor = tracked.tensor.reshape(-1) if flat else tracked.tensor
    return emission.constant_value(tensor, packed=True)


def _linear(emission: Emission, call: Call) -> None:
    args = call.args
    _fully_connected(emission, call.node, args["input"], args["weight"], args["bias"], 0)


def _linear_refusal(call: Call) -> str | None:
    if call.rank("weight") != 2 or call.rank("input") < 1:
        return "its weight is no matrix"
    if call.args["bias"] is not None and call.rank("bias") != 1:
        return "its bias is no vector"
    return None


def _addmm(emission: Emission, call: Call) -> None:
    args = call.args
    _fully_connected(
        emission, call.node, args["mat1"], args["mat2"], args["self"], TRANSPOSE_WEIGHTS
    )


def _addmm_refusal(call: Call) -> str | None:
    if call.args["alpha"] != 1 or call.args["beta"] != 1:
        return "alpha and beta must be 1"
    columns = shape_of(call.node)[1]
    shape = call.shape("self")
    if len(shape) > 2 or shape[-1:] != (columns,) or (len(shape) == 2 and shape[0] != 1):
        return "what it adds is not one row"
    if len(shape) == 2 and not call.is_constant("self"):
        return "what it adds is a matrix of one row that is known only at run time"
    return None


def _product(emission: Emission, call: Call) -> None:
    left, right = _factors(call.node)
    if len(shape_of(right)) == 2 and emission.of(right).tensor is not None:
        _fully_connected(emission, call.node, left, right, None, TRANSPOSE_WEIGHTS)
        return
    value = emission.add(
        NodeKind.BATCH_MATRIX_MULTIPLY,
        shape_of(call.node),
        input1_id=emission.id_of(emission.of(left)),
        input2_id=emission.id_of(emission.of(right)),
    )
    emission.define_value(call.node, value)


def _factors(node: Node) -> tuple[Node, Node]:
    args = arguments_of(node)
    return args["self"], args["other" if "other" in args else "mat2"]


def _product_refusal(call: Call) -> str | None:
    left, right = (len(shape_of(factor)) for factor in _factors(call.node))
    if left < 2 or right < 2:
        return "a factor is a vector"
    return None


_PRODUCT = Operator(_product, _product_refusal)
LINEAR: Table = {
    _aten.linear.default: Operator(_linear, _linear_refusal),
    _aten.addmm.default: Operator(_addmm, _addmm_refusal),
    **dict.fromkeys([_aten.mm.default, _aten.bmm.default, _aten.matmul.default], _PRODUCT),
}
