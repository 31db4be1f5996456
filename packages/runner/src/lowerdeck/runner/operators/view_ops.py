"""Tensor operators that torch does not have: dim-order copies, views and row copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from lowerdeck.runner.errors import ExecutionError
from lowerdeck.runner.values.arena import strides_of
from lowerdeck.runner.values.tensors import TensorSpec


def resize(out: torch.Tensor, sizes: Sequence[int], spec: TensorSpec) -> None:
    """Resize ``out`` to ``sizes`` in place, in the layout of ``spec``.

    Args:
        out: Tensor with memory for at least ``spec.capacity`` elements.

    Raises:
        ExecutionError: The shape exceeds the planned one.
    """
    check_shape(sizes, spec)
    out.as_strided_(tuple(sizes), strides_of(sizes, spec.dim_order))


def check_shape(sizes: Sequence[int], spec: TensorSpec) -> None:
    """Check a shape against the planned one.

    Raises:
        ExecutionError: The shape of a static value differs, or a dynamic value has another rank or
            more elements than planned.
    """
    if not spec.dynamic:
        if tuple(sizes) != spec.sizes:
            raise ExecutionError(
                f"value {spec.index} got shape {list(sizes)}; the program says {list(spec.sizes)}"
            )
        return
    if len(sizes) != len(spec.sizes) or math.prod(sizes) > spec.capacity:
        raise ExecutionError(
            f"value {spec.index} got shape {list(sizes)}; the program has memory for "
            f"{spec.capacity} elements in {len(spec.sizes)} dimensions"
        )


def dim_order_copy(
    source: torch.Tensor,
    non_blocking: bool,  # noqa: ARG001 - part of the operator's signature
    dim_order: Sequence[int] | None,  # noqa: ARG001 - implied by the layout of out
    out: torch.Tensor,
    spec: TensorSpec,
) -> None:
    """Copy ``source`` into ``out``, whose dtype and layout may differ."""
    if out.shape != source.shape:
        resize(out, source.shape, spec)
    out.copy_(source)


def device_copy(source: torch.Tensor, out: torch.Tensor, spec: TensorSpec) -> None:
    """Copy ``source`` into ``out``; host and device are identical here."""
    dim_order_copy(source, False, None, out, spec)


def empty_dim_order(
    sizes: Sequence[int],
    dim_order: Sequence[int] | None,  # noqa: ARG001 - implied by the layout of out
    out: torch.Tensor,
    spec: TensorSpec,
) -> None:
    """Resize ``out`` to ``sizes`` without changing its elements."""
    resize(out, sizes, spec)


def view(source: torch.Tensor, sizes: Sequence[int], out: torch.Tensor, spec: TensorSpec) -> None:
    """Make ``out`` a view of ``source`` with shape ``sizes`` (one may be -1)."""
    product = math.prod(size for size in sizes if size != -1)
    inferred = list(sizes).count(-1)
    if inferred > 1 or any(size < -1 for size in sizes):
        raise ExecutionError(
            f"invalid view shape {list(sizes)}; expected sizes of 0 or more, or one -1"
        )
    if inferred and product:
        sizes = [source.numel() // product if size == -1 else size for size in sizes]
    if math.prod(sizes) != source.numel() or (inferred and not product):
        raise ExecutionError(f"{list(source.shape)} cannot be viewed as {list(sizes)}")
    if source.dtype != out.dtype:
        raise ExecutionError(f"a view of {source.dtype} cannot have dtype {out.dtype}")
    check_shape(sizes, spec)
    out.set_(
        source.untyped_storage(),
        source.storage_offset(),
        tuple(sizes),
        strides_of(sizes, spec.dim_order),
    )


def copy_index(out: torch.Tensor, row: torch.Tensor, index: int, spec: TensorSpec) -> None:
    """Write ``row`` as row ``index`` of ``out``; resize dynamic ``out`` to ``index + 1`` rows."""
    if index < 0:
        raise ExecutionError(f"invalid row index {index}; expected 0 or more")
    if spec.dynamic:
        resize(out, (index + 1, *row.shape), spec)
    if out.dim() == 0 or index >= out.shape[0] or out.shape[1:] != row.shape:
        raise ExecutionError(
            f"row {index} of shape {list(row.shape)} does not fit in {list(out.shape)}"
        )
    out[index].copy_(row)


ViewKernel = Callable[..., None]

VIEW_OPERATORS: dict[str, ViewKernel] = {
    "dim_order_ops::_to_dim_order_copy.out": dim_order_copy,
    "dim_order_ops::_clone_dim_order.out": dim_order_copy,
    "dim_order_ops::_empty_dim_order.out": empty_dim_order,
    "et_copy::_h2d_copy.out": device_copy,
    "et_copy::_d2h_copy.out": device_copy,
    "executorch_prim::et_view.default": view,
    "executorch_prim::et_copy_index.tensor": copy_index,
}
"""Functions of the runtime's tensor operators, by full name."""
