"""Pass: choose the layout of every tensor, and convert where a kernel requires another.

Kernels have two layouts: contiguous and, for images, channels-last. Inputs, constants and
``memory_format=`` determine what is channels-last, and the layout propagates through the operators
whose kernels support it. Recorded strides of their results are not used: they are ambiguous for
dimensions of size 1, and kernels may write others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import OutputKind

from lowerdeck.emitter.frontend.tensors import layout_of
from lowerdeck.emitter.ir.graph import (
    Block,
    Call,
    Delegate,
    Method,
    Operation,
    Scan,
    blocks_of,
    values_in,
)
from lowerdeck.emitter.ir.kernels import KernelTable
from lowerdeck.emitter.ir.runtime_ops import CLONE_DIM_ORDER, TO_DIM_ORDER_COPY
from lowerdeck.emitter.ir.values import (
    DimOrder,
    Role,
    TensorValue,
    channels_last_order,
    contiguous_order,
)
from lowerdeck.torch_base import OpOverload, pytree, schema_of

_COPIES = frozenset({"clone", "_to_copy"})


def legalize_layouts(method: Method, table: KernelTable) -> None:
    """Set the layout of every tensor and insert conversions.

    Requires:
        Inputs, constants and buffers have the layout of the user's tensors.

    Ensures:
        Kernels get tensors in layouts that they take.
    """
    _Layouts(table).block(method.block)


class _Layouts:
    def __init__(self, table: KernelTable) -> None:
        self._table = table
        self._before: list[Operation] = []
        self._relaid: dict[tuple[TensorValue, DimOrder], TensorValue] = {}

    def block(self, block: Block) -> None:
        body: list[Operation] = []
        saved, self._relaid = self._relaid, dict(self._relaid)
        for operation in block.body:
            outer, self._before = self._before, []
            self._operation(operation)
            body += [*self._before, operation]
            self._before = outer
        # A conversion in an inner block does not dominate the operations after it.
        self._relaid = saved
        block.body = body

    def _operation(self, operation: Operation) -> None:
        if isinstance(operation, Call):
            self._call(operation)
        elif isinstance(operation, Delegate):
            self._delegate(operation)
        elif isinstance(operation, Scan):
            # The kernel that selects rows supports only the contiguous layout.
            operation.xs = [self._in_order(x, contiguous_order(x.rank)) for x in operation.xs]
        for inner in blocks_of(operation):
            self.block(inner)

    def _call(self, call: Call) -> None:
        tensors = [value for value in values_in(call.args) if isinstance(value, TensorValue)]
        if call.op_name in _COPIES and isinstance(call.target, OpOverload):
            self._copy(call)
        elif self._table.is_open and call.is_foreign:
            self._foreign(call)
        else:
            rank: int | None = None
            order: DimOrder = ()
            if self._takes_channels_last(call, tensors) and _all_channels_last(tensors):
                rank = _image_rank(tensors)
                order = channels_last_order(rank)
            call.args = self._laid_out(call.args, rank, order)
            for out in _tensor_outs(call):
                out.dim_order = order if out.rank == rank else contiguous_order(out.rank)

    def _foreign(self, call: Call) -> None:
        """Give a kernel of another library the layouts that the program records.

        The layouts that such a kernel accepts are unknown; arguments get the layout of a fake
        result of the same rank.
        """
        metas = pytree.tree_leaves(call.origin.meta.get("val")) if call.origin else []
        for out, meta in zip(call.outs, metas, strict=False):
            if isinstance(out, TensorValue) and isinstance(meta, torch.Tensor):
                out.dim_order = layout_of(meta)
        images = {out.rank: out.dim_order for out in _tensor_outs(call)}
        call.args = pytree.tree_map(
            lambda value: (
                self._in_order(value, images.get(value.rank, value.dim_order))
                if isinstance(value, TensorValue) and value.constant is None
                else value
            ),
            call.args,
        )

    def _takes_channels_last(self, call: Call, tensors: list[TensorValue]) -> bool:
        if call.op_name in self._table.channels_last:
            return True
        alike = len({value.sizes for value in tensors}) == 1
        return alike and call.op_name in self._table.channels_last_alike

    def _copy(self, call: Call) -> None:
        """Give a copy the layout of its memory format argument."""
        source, (out,) = call.args[0], _tensor_outs(call)
        names = [argument.name for argument in schema_of(call.target).arguments]
        memory_format = call.args[names.index("memory_format")]
        if "non_blocking" in names:
            # A hint for other devices, which the kernel rejects.
            call.args[names.index("non_blocking")] = False
        out.dim_order = _order_for(memory_format, source)
        if out.dim_order == source.dim_order == contiguous_order(out.rank):
            call.args[names.index("memory_format")] = None
            return
        same = out.dtype == source.dtype
        call.target = CLONE_DIM_ORDER if same else TO_DIM_ORDER_COPY
        call.args = [source, False, list(out.dim_order)]

    def _delegate(self, delegate: Delegate) -> None:
        """Give a delegate's inputs and results the layouts that it was compiled for.

        The layouts are read from the delegate's program: a retrace of the caller may have changed
        strides.
        """
        inner = getattr(delegate.module, "original_module", None)
        metas = list(_user_inputs(inner)) if inner is not None else []
        if len(metas) == len(delegate.args):
            delegate.args = [
                self._in_order(value, layout_of(meta))
                if isinstance(value, TensorValue) and isinstance(meta, torch.Tensor)
                else value
                for value, meta in zip(delegate.args, metas, strict=True)
            ]
        results = list(_user_outputs(inner)) if inner is not None else []
        if len(results) != len(delegate.outs):
            return
        for out, meta in zip(delegate.outs, results, strict=True):
            if isinstance(out, TensorValue) and isinstance(meta, torch.Tensor):
                out.dim_order = layout_of(meta)

    def _laid_out(self, argument: Any, rank: int | None, order: DimOrder) -> Any:
        """Return an argument with tensors of ``rank`` in ``order`` and all others contiguous."""
        if isinstance(argument, TensorValue):
            expected = order if argument.rank == rank else contiguous_order(argument.rank)
            return self._in_order(argument, expected)
        if isinstance(argument, (list, tuple)):
            return [self._laid_out(item, rank, order) for item in argument]
        return argument

    def _in_order(self, value: TensorValue, order: DimOrder) -> TensorValue:
        if value.dim_order == order:
            return value
        key = (value, order)
        if key in self._relaid:
            return self._relaid[key]
        relaid = value.like(f"{value.name}.relaid", order)
        if value.constant is not None and not value.state:
            # Its bytes are written in the other order: no run-time cost.
            relaid.constant, relaid.key = value.constant, value.key
            relaid.fixed_role = Role.CONSTANT
        else:
            args = [value, False, list(order)]
            self._before.append(Call(CLONE_DIM_ORDER, args, [relaid], None))
        self._relaid[key] = relaid
        return relaid


def _tensor_outs(call: Call) -> list[TensorValue]:
    return [out for out in call.outs if isinstance(out, TensorValue)]


def _image_rank(tensors: list[TensorValue]) -> int:
    return max((value.rank for value in tensors), default=0)


def _all_channels_last(tensors: list[TensorValue]) -> bool:
    """Return whether every computed image is channels-last, and there is at least one."""
    rank = _image_rank(tensors)
    if rank not in (4, 5):
        return False
    order = channels_last_order(rank)
    images = [v for v in tensors if v.rank == rank and (v.constant is None or v.state)]
    return bool(images) and all(value.dim_order == order for value in images)


def _order_for(memory_format: torch.memory_format | None, source: TensorValue) -> DimOrder:
    if memory_format is None or memory_format is torch.preserve_format:
        return source.dim_order
    if memory_format in (torch.channels_last, torch.channels_last_3d) and source.rank in (4, 5):
        return channels_last_order(source.rank)
    return contiguous_order(source.rank)


def _user_inputs(exported: Any) -> Iterator[Any]:
    names = set(exported.graph_signature.user_inputs)
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            yield node.meta.get("val")


def _user_outputs(exported: Any) -> Iterator[Any]:
    (output,) = [node for node in exported.graph.nodes if node.op == "output"]
    specs = exported.graph_signature.output_specs
    for spec, value in zip(specs, output.args[0], strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            yield value.meta.get("val") if isinstance(value, fx.Node) else value
