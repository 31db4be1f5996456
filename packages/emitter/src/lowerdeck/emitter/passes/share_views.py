"""Pass: let views share the memory of their base if the bytes are the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from lowerdeck.emitter.ir.graph import Call, Method, all_blocks
from lowerdeck.emitter.ir.runtime_ops import RESHAPE_IN_PLACE
from lowerdeck.emitter.ir.values import Role, TensorValue, root_of

_RESHAPES = frozenset({"view", "unsqueeze", "squeeze"})
# A complex number has the same bytes as a pair of real ones.
_PAIRS = frozenset({"view_as_complex", "view_as_real"})
_SAME = frozenset({"alias", "detach", "clone", "lift_fresh", "_to", "expand"})
_PERMUTES = frozenset({"permute", "transpose", "t"})


def share_views(method: Method) -> None:
    """Set ``base`` on each result that is a view of its argument's bytes.

    If the shape is dynamic, or the memory is from the caller, the view is created at run time by
    ``et_view``, which copies nothing either.

    Requires:
        Layouts are decided; the method is functional.

    Ensures:
        A tensor with a base needs no kernel but ``et_view``.
    """
    at_run_time: dict[TensorValue, TensorValue] = {}
    for block in all_blocks(method.block):
        for operation in block.body:
            if isinstance(operation, Call):
                _share(operation, at_run_time)


def _share(call: Call, at_run_time: dict[TensorValue, TensorValue]) -> None:
    source = call.args[0] if call.args else None
    outs = [out for out in call.outs if isinstance(out, TensorValue)]
    if not isinstance(source, TensorValue) or not outs:
        return
    if call.view_name in _PAIRS:
        out = outs[0]
        if not (_varies(source) or out.dynamic) and source.contiguous and out.contiguous:
            out.base = source
        return
    if any(out.dtype.itemsize != source.dtype.itemsize for out in outs):
        return
    # A view may reinterpret the same bytes as another dtype.
    reads_bits = call.view_name in _RESHAPES and isinstance(call.args[1], torch.dtype)
    if any(out.dtype != source.dtype for out in outs) and not reads_bits:
        return
    if _varies(source) or any(out.dynamic for out in outs):
        size = _size_at_run_time(call, source, outs[0])
        if size is not None:
            # Flatten views of views to the outermost base.
            root = at_run_time.get(source, source)
            call.target, call.args = RESHAPE_IN_PLACE, [root, size]
            at_run_time[outs[0]] = outs[0].base = root
        return
    offsets = _offsets(call, source, outs)
    if offsets is None:
        return
    for out, offset in zip(outs, offsets, strict=True):
        out.base, out.base_offset = source, offset


def _varies(source: TensorValue) -> bool:
    """Return whether the offset or the shape of ``source`` is known only at run time."""
    root, _ = root_of(source)
    return source.dynamic or root.dynamic or root.fixed_role is Role.CALLER


def _size_at_run_time(call: Call, source: TensorValue, out: TensorValue) -> list[Any] | None:
    """Return the ``size`` argument of ``et_view``; None if it cannot express the view."""
    if not (source.contiguous and out.contiguous) or out.dtype != source.dtype:
        return None
    if out.nbytes > source.nbytes:
        # The product of the bounds exceeds the bytes that the runtime has for the source.
        return None
    name = call.view_name
    if name not in _RESHAPES and not (name in _PERMUTES and _keeps_order(call, source)):
        return None
    if name == "view":
        return list(call.args[1])
    # The runtime can infer one dimension.
    size = [dim if isinstance(dim, int) else -1 for dim in out.shape]
    return size if size.count(-1) <= 1 else None


def _offsets(call: Call, source: TensorValue, outs: Sequence[TensorValue]) -> Sequence[int] | None:
    """Return the offset of each output in the bytes of ``source``; None if it must be computed."""
    name, args, out = call.view_name, call.args, outs[0]
    if name in _SAME:
        is_alike = source.sizes == out.sizes and source.dim_order == out.dim_order
        return [0] if is_alike else None
    if not source.contiguous or any(not part.contiguous for part in outs):
        return None
    if name in _RESHAPES:
        return [0]
    if name in _PERMUTES:
        return [0] if _keeps_order(call, source) else None
    if name == "select" and _outermost(args[1], source):
        size = source.sizes[_first_dim(args[1], source)]
        return [(args[2] % size) * out.nbytes] if isinstance(args[2], int) else None
    if name == "slice" and _outermost(args[1], source):
        return _slice_offset(args, source)
    if name in ("split_with_sizes", "split", "unbind"):
        dim = args[1] if name == "unbind" else args[2]
        if _outermost(dim, source):
            return list(accumulate((part.nbytes for part in outs[:-1]), initial=0))
    return None


def _first_dim(dim: Any, source: TensorValue) -> int:
    return int(dim) % max(source.rank, 1)


def _outermost(dim: Any, source: TensorValue) -> bool:
    """Return whether slices of ``source`` along ``dim`` are contiguous in memory."""
    if not isinstance(dim, int) or source.rank == 0:
        return False
    return all(size == 1 for size in source.sizes[: _first_dim(dim, source)])


def _slice_offset(args: Sequence[Any], source: TensorValue) -> list[int] | None:
    dim, start, step = _first_dim(args[1], source), args[2], args[4]
    if not isinstance(start, (int, type(None))) or step != 1:
        return None
    size = source.sizes[dim]
    first = 0 if start is None else start
    first = min(max(first + size if first < 0 else first, 0), size)
    row = source.nbytes // size if size else 0
    return [first * row]


def _keeps_order(call: Call, source: TensorValue) -> bool:
    """Return whether a permutation moves only dimensions of size 1."""
    # A dynamic size may be 1, but comparing it would add a guard.
    moved = [
        dim
        for dim in call.order
        if source.sizes[dim] != 1 or not isinstance(source.shape[dim], int)
    ]
    return moved == sorted(moved)
