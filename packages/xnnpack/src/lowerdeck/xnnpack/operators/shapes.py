"""What moves elements or renames their dimensions, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnOperator
from lowerdeck.xnnpack.emit import (
    Call,
    Emission,
    Tracked,
    fake,
    is_fixed,
    is_one,
    reshape_refusal,
    resized,
    shape_of,
    symbols_refusal,
)
from lowerdeck.xnnpack.operators.contract import Integers, Table, move
from lowerdeck.xnnpack.payload.encoding import HALF
from lowerdeck.xnnpack.payload.layout import Layout

_aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_RESHAPED_FROM = "reshaped from"


def _same(emission: Emission, call: Call) -> None:
    source = next(value for value in call.args.values() if isinstance(value, fx.Node))
    emission.define(call.node, emission.of(source))


def _cast(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["self"])
    before, after = (one.meta["val"].dtype for one in (call.args["self"], call.node))
    if before != after and after == torch.float16:
        tracked = emission.twin(tracked, HALF)
    emission.define(call.node, tracked)


def _dropout_refusal(call: Call) -> str | None:
    return "it is in training mode" if call.args["train"] else None


def _to_copy_refusal(call: Call) -> str | None:
    if call.args.get("dtype") not in (None, *_FLOATS):
        return "it changes the dtype"
    if call.args.get("device") not in (None, torch.device("cpu")):
        return "it changes the device"
    return None


def _reshape(emission: Emission, call: Call) -> None:
    define_reshaped(emission, call.node, emission.of(call.args["self"]))


def define_reshaped(emission: Emission, node: fx.Node, tracked: Tracked) -> None:
    """Define a node's result as a tensor with other sizes, which ``reshape_refusal`` allows.

    Args:
        emission: Where to add.
        node: The node.
        tracked: The tensor.
    """
    shape = shape_of(node)
    # A write through a view is functionalized to a round trip: view, compute, view back.
    origin: Tracked | None = tracked
    while origin is not None:
        if tuple(map(str, shape)) == tuple(map(str, origin.shape)):
            emission.define(node, origin)
            return
        origin = origin.derived.get(_RESHAPED_FROM)
    ids = tracked.ids
    # One pixel: the plain order and the channels-last order are the same bytes.
    if (
        Layout.PLAIN not in ids
        and len(tracked.shape) >= 3
        and all(map(is_one, tracked.shape[2:]))
        and symbols_refusal(shape) is None
    ):
        emission.define_value(node, emission.reshaped(ids[Layout.CHANNELS_LAST], shape))
    else:
        emission.define(node, resized(emission, tracked, shape))
    emission.of(node).derived[_RESHAPED_FROM] = tracked


def _reshape_refusal(call: Call) -> str | None:
    return reshape_refusal(call.shape("self"), shape_of(call.node))


def reshape_int8_refusal(call: Call) -> str | None:
    """Return why integers cannot be given the sizes of a call's result, or None.

    Args:
        call: The call; of several results the first stands for all.
    """
    value = call.node.meta["val"]
    tensor = value[0] if isinstance(value, (list, tuple)) else value
    if symbols_refusal(tensor.shape):
        return "it has several symbolic sizes, and is reshaped by multiplying"
    return None


def _as_strided_refusal(call: Call) -> str | None:
    value = fake(call.args["self"])
    assert value is not None
    size, stride, first = (call.args[name] for name in ("size", "stride", "storage_offset"))
    if not all(isinstance(one, int) for one in (*size, *stride, *value.shape, first or 0)):
        return "its sizes are symbolic"
    expected, step = [], 1
    for one in reversed(size):
        expected.append(step)
        step *= one
    fits = all(a == b or n == 1 for a, b, n in zip(stride, expected[::-1], size, strict=True))
    if not fits or step != value.numel() or first or not value.is_contiguous():
        return "it reads the memory in another order"
    return None


def _permute_emitter(
    permutation: Callable[[Call], Sequence[int]],
) -> Callable[[Emission, Call], None]:
    def emit(emission: Emission, call: Call) -> None:
        tracked = emission.of(call.args["self"])
        rank = len(tracked.shape)
        order = [axis % rank for axis in permutation(call)] if rank else []
        layout = tracked.preferred
        memory = [layout.position(axis, rank) for axis in order]
        value = emission.permuted(
            emission.id_of(tracked, layout), memory, [tracked.shape[axis] for axis in order]
        )
        emission.define_value(call.node, value)

    return emit


def _swapped(call: Call, *names: str) -> list[int]:
    order = list(range(call.rank("self")))
    if order:
        first, second = (int(call.args[name]) for name in names or ("dim0", "dim1"))
        order[first], order[second] = order[second], order[first]
    return order


def _turned_matrices(call: Call) -> list[int]:
    order = list(range(call.rank("self")))
    return [*order[:-2], order[-1], order[-2]]


def _moved(call: Call) -> list[int]:
    """Return the order of ``movedim``: what is named goes where it is told, the rest follows."""
    rank = call.rank("self")
    sources, targets = (
        [axis % rank for axis in ([given] if isinstance(given, int) else given)]
        for given in (call.args["source"], call.args["destination"])
    )
    others = iter([axis for axis in range(rank) if axis not in sources])
    places = dict(zip(targets, sources, strict=True))
    return [places[axis] if axis in places else next(others) for axis in range(rank)]


def _expand(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["self"])
    shape = shape_of(call.node)
    repeats = _repeats(call)
    if all(map(is_one, repeats)):
        _reshape(emission, call)
        return
    # The runtime repeats elements only where arithmetic broadcasts them.
    ones = emission.constant_value(torch.ones([int(size) for size in repeats]))
    value = emission.add(
        XnnOperator.MULTIPLY, shape, input1_id=emission.id_of(tracked), input2_id=ones
    )
    emission.define_value(call.node, value)


def _repeats(call: Call) -> list[Dim]:
    """Return how often each dimension of the result is repeated."""
    before, after = call.shape("self"), shape_of(call.node)
    kept = [*[1] * (len(after) - len(before)), *before]
    return [
        new if is_one(old) and not is_one(new) else 1 for old, new in zip(kept, after, strict=True)
    ]


def _expand_refusal(call: Call) -> str | None:
    if not all(map(is_fixed, _repeats(call))):
        return "it repeats elements a symbolic number of times"
    return _reshape_refusal(call)


def _expand_int8_refusal(call: Call) -> str | None:
    if not all(map(is_one, _repeats(call))):
        return "it repeats elements by multiplying"
    return reshape_int8_refusal(call)


_SAME = move(_same)
_RESHAPE = move(_reshape, _reshape_refusal, int8_refusal=reshape_int8_refusal)
_PERMUTE = move(_permute_emitter(lambda call: call.args["dims"]))
_TRANSPOSE = move(_permute_emitter(_swapped))
_REVERSE = move(_permute_emitter(lambda call: range(call.rank("self"))[::-1]))
_TURN_MATRICES = move(_permute_emitter(_turned_matrices))
_MOVE = move(_permute_emitter(_moved))
_SWAP_AXES = move(_permute_emitter(lambda call: _swapped(call, "axis0", "axis1")))
_EXPAND = move(_expand, _expand_refusal, int8_refusal=_expand_int8_refusal)
SHAPES: Table = {
    **dict.fromkeys(
        [
            *(_aten.alias.default, _aten.alias_copy.default, _aten.clone.default),
            *(_aten.contiguous.default, _aten.detach.default, _aten.detach_copy.default),
            *(_aten.lift_fresh_copy.default, _aten.positive.default),
        ],
        _SAME,
    ),
    **dict.fromkeys(
        [
            _aten.dropout.default,
            *(_aten.feature_dropout.default, _aten.alpha_dropout.default),
        ],
        move(_same, _dropout_refusal),
    ),
    **dict.fromkeys(
        [
            *(_aten._to_copy.default, _aten.to.dtype, _aten.to.dtype_layout),
            *(_aten.to.device, _aten.type_as.default),
        ],
        move(_cast, _to_copy_refusal),
    ),
    **dict.fromkeys(
        [
            *(_aten.view.default, _aten.view_copy.default, _aten.reshape.default),
            *(_aten._unsafe_view.default, _aten.flatten.using_ints, _aten.unflatten.int),
            *(_aten.reshape_as.default, _aten.view_as.default),
            *(_aten.unsqueeze.default, _aten.unsqueeze_copy.default),
            *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
            *(_aten.squeeze_copy.default, _aten.squeeze_copy.dim, _aten.squeeze_copy.dims),
        ],
        _RESHAPE,
    ),
    **dict.fromkeys(
        [_aten.as_strided.default, _aten.as_strided_copy.default],
        move(_reshape, _as_strided_refusal, integers=Integers.NEVER),
    ),
    **dict.fromkeys([_aten.permute.default, _aten.permute_copy.default], _PERMUTE),
    **dict.fromkeys([_aten.transpose.int, _aten.transpose_copy.int], _TRANSPOSE),
    **dict.fromkeys([_aten.t.default, _aten.t_copy.default, _aten.numpy_T.default], _REVERSE),
    **dict.fromkeys([_aten.mT.default, _aten.mH.default, _aten.adjoint.default], _TURN_MATRICES),
    **dict.fromkeys([_aten.movedim.int, _aten.movedim.intlist], _MOVE),
    _aten.swapaxes.default: _SWAP_AXES,
    _aten.swapdims.default: _TRANSPOSE,
    **dict.fromkeys(
        [_aten.expand.default, _aten.expand_copy.default, _aten.expand_as.default], _EXPAND
    ),
}
