"""Views, permutations, casts and expansions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnOperator
from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import (
    Call,
    Emission,
    Tracked,
    is_fixed,
    is_one,
    reshape_refusal,
    resized,
    same_sizes,
    shape_of,
    symbols_refusal,
)
from lowerdeck.xnnpack.operators.contract import Table, move, table
from lowerdeck.xnnpack.payload import HALF, Layout

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_RESHAPED_FROM = "reshaped from"


def _cast(e: Emission, x: Tracked, call: Call) -> Tracked:
    before, after = (source.meta["val"].dtype for source in (call.args["self"], call.node))
    return e.in_encoding(x, HALF) if before != after and after == torch.float16 else x


def _dropout_refusal(call: Call) -> str | None:
    return "it is in training mode" if call.args["train"] else None


def _to_copy_refusal(call: Call) -> str | None:
    if call.args.get("dtype") not in (None, *_FLOATS):
        return "it changes the dtype"
    if call.args.get("device") not in (None, torch.device("cpu")):
        return "it changes the device"
    return None


def _reshape(e: Emission, x: Tracked, call: Call) -> Tracked:
    return reshape(e, x, call.result)


def reshape(emission: Emission, tracked: Tracked, shape: Sequence[Dim]) -> Tracked:
    """Return a tensor with other sizes, which ``reshape_refusal`` allows."""
    # Functionalization turns a write through a view into view, compute, view back.
    origin: Tracked | None = tracked
    while origin is not None:
        if same_sizes(shape, origin.shape):
            return origin
        origin = origin.derived.get(_RESHAPED_FROM)
    ids = tracked.ids
    # One pixel: both layouts have the same bytes.
    if (
        Layout.PLAIN not in ids
        and len(tracked.shape) >= 3
        and all(map(is_one, tracked.shape[2:]))
        and symbols_refusal(shape) is None
    ):
        result = emission.tracked(shape, emission.reshaped(ids[Layout.CHANNELS_LAST], shape))
    else:
        result = resized(emission, tracked, shape)
    result.derived[_RESHAPED_FROM] = tracked
    return result


def _reshape_refusal(call: Call) -> str | None:
    return reshape_refusal(call.shape("self"), call.result)


def reshape_int8_refusal(call: Call) -> str | None:
    """Return why integers cannot be reshaped to a call's result, or None.

    Args:
        call: The call; of several results, only the first is checked.
    """
    value = call.node.meta["val"]
    tensor = value[0] if isinstance(value, (list, tuple)) else value
    if symbols_refusal(tensor.shape):
        return "it has several symbolic sizes, and is reshaped by multiplying"
    return None


def _permute(e: Emission, x: Tracked, call: Call) -> Tracked:
    rank, layout = len(x.shape), x.preferred
    axes = order_of(call.node)
    memory = [layout.position(axis, rank) for axis in axes]
    shape = [x.shape[axis] for axis in axes]
    return e.tracked(call.result, e.permuted(e.id_of(x, layout), memory, shape))


def order_of(node: Node) -> list[int]:
    """Return the source dimension of each dimension of a permuted tensor."""
    args = arguments_of(node)
    rank = len(shape_of(args["self"]))
    if "dims" in args:
        return [int(dim) % rank for dim in args["dims"]]
    order = list(range(rank))
    if node.target is torch.ops.aten.numpy_T.default:
        return order[::-1]
    if rank > 1:
        # `t` and `mT` have no dimension arguments: they swap the last two.
        first, second = (int(args.get(name, last)) for name, last in (("dim0", -2), ("dim1", -1)))
        order[first], order[second] = order[second], order[first]
    return order


def _expand(e: Emission, x: Tracked, call: Call) -> Tracked:
    repeats, shape = _repeats(call), call.result
    if all(map(is_one, repeats)):
        return reshape(e, x, shape)
    # The runtime repeats elements only by broadcasting arithmetic.
    ones = e.constant_value(torch.ones([int(size) for size in repeats]))
    value = e.add(XnnOperator.MULTIPLY, shape, input1_id=e.id_of(x), input2_id=ones)
    return e.tracked(shape, value)


def _repeats(call: Call) -> list[Dim]:
    """Return how often each dimension of the result is repeated."""
    before, after = call.shape("self"), call.result
    kept = [*[1] * (len(after) - len(before)), *before]
    return [
        new if is_one(old) and not is_one(new) else 1 for old, new in zip(kept, after, strict=True)
    ]


def _expand_refusal(call: Call) -> str | None:
    repeats = _repeats(call)
    if not all(map(is_fixed, repeats)):
        return "it repeats elements a symbolic number of times"
    # A multiplication that repeats elements supports any sizes.
    return _reshape_refusal(call) if all(map(is_one, repeats)) else None


def _expand_int8_refusal(call: Call) -> str | None:
    if not all(map(is_one, _repeats(call))):
        return "it repeats elements by multiplying"
    return reshape_int8_refusal(call)


SHAPES: Table = table(
    {
        "alias alias_copy clone contiguous detach detach_copy lift_fresh_copy positive": move(
            lambda _, x, __: x
        ),
        "dropout feature_dropout alpha_dropout": move(lambda _, x, __: x, _dropout_refusal),
        "_to_copy to.dtype to.dtype_layout to.device type_as": move(_cast, _to_copy_refusal),
        "view view_copy reshape _unsafe_view flatten.using_ints unflatten.int reshape_as view_as "
        "unsqueeze unsqueeze_copy squeeze squeeze.dim squeeze.dims "
        "squeeze_copy squeeze_copy.dim squeeze_copy.dims": move(
            _reshape, _reshape_refusal, int8_refusal=reshape_int8_refusal
        ),
        "permute permute_copy transpose.int transpose_copy.int swapdims t t_copy numpy_T mT mH "
        "adjoint": move(_permute),
        "expand expand_copy expand_as": move(
            _expand, _expand_refusal, int8_refusal=_expand_int8_refusal
        ),
    }
)
