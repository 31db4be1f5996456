"""Operators that move elements, and compute none."""

from __future__ import annotations

from typing import Any

import torch
from openvino import opset13
from torch.fx import Node

from lowerdeck.lowered_module import (
    PartitionView,
    arguments_of,
    operator_name,
    visits,
)
from lowerdeck.openvino.layout import whole
from lowerdeck.openvino.operators.dtypes import VALUES, WITH_POSITIONS
from lowerdeck.openvino.translation import TYPES, Translation, axes_of, axis_of, tensor_of

_SHAPES = (
    *("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten.using_ints"),
    *("aten.unflatten.int", "aten.reshape_as", "aten.view_as"),
)
_SQUEEZED = ("aten.squeeze", "aten.squeeze.dim", "aten.squeeze.dims")
_SAME = (
    *("aten.alias", "aten.clone", "aten.contiguous", "aten.detach", "aten.lift_fresh_copy"),
    "aten.dropout",
)
_CONVERSIONS = (
    *("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other"),
    *("aten._to_copy", "aten.type_as"),
)
_EXPANDED = ("aten.expand", "aten.expand_as")
_ORDERS = ("aten.permute", "aten.transpose.int", "aten.t", "aten.numpy_T", "aten.mT")
_PARTS = (
    *("aten.split.Tensor", "aten.split_with_sizes", "aten.chunk", "aten.unbind.int"),
    "aten.split.sizes",
)


def _one_dynamic(node: Node) -> bool | str:
    sizes = [size for size in tensor_of(node).shape if not isinstance(size, int)]
    return len(sizes) < 2 or "several of its sizes are dynamic"


def _static(node: Node) -> bool | str:
    sizes = [size for size in tensor_of(node).shape if not isinstance(size, int)]
    return not sizes or "its sizes are dynamic"


def _idle(node: Node) -> bool | str:
    return not arguments_of(node).get("train") or "it drops at random"


def _conversion(node: Node) -> bool | str:
    for dtype in (tensor_of(node.all_input_nodes[0]).dtype, tensor_of(node).dtype):
        if dtype == torch.int64:
            return "64-bit integers become 32-bit ones"
        if dtype not in VALUES:
            return f"dtype {dtype} is not taken"
    return True


def _asserted(node: Node) -> bool | str:
    """Take what is said of a tensor that a partition can be given: it says nothing here."""
    dtype = tensor_of(node.all_input_nodes[0]).dtype
    return dtype in TYPES or f"dtype {dtype} is not taken"


def _numbered(node: Node) -> bool | str:
    """Take a table and positions in it, with whatever the table holds."""
    found = arguments_of(node)
    table = tensor_of(found["weight"] if "weight" in found else found["self"])
    return table.dtype in VALUES or f"dtype {table.dtype} is not taken"


def _sizes(node: Node) -> list[tuple[Any, Any]]:
    """Return how long the dimensions of a tensor are, and those of positions in it."""
    found = arguments_of(node)
    shapes = tensor_of(found["self"]).shape, tensor_of(found["index"]).shape
    return list(zip(*shapes, strict=True))


def _gathered(node: Node) -> bool | str:
    """Take as many positions as elements, or fewer, in dimensions that are known."""
    axis = axis_of(node, arguments_of(node)["dim"])
    for dim, pair in enumerate(_sizes(node)):
        known = all(isinstance(size, int) for size in pair)
        if dim != axis and not known and str(pair[0]) != str(pair[1]):
            return f"dimension {dim} is {pair[0]} long for {pair[1]} positions: both must be known"
    return _numbered(node)


def _one_index(node: Node) -> bool | str:
    """Take positions in one dimension; a mask's result is as long as it has truths."""
    given = [one for one in arguments_of(node)["indices"] if one is not None]
    if len(given) != 1 or tensor_of(given[0]).dtype not in (torch.int32, torch.int64):
        return "it takes something else than positions in one dimension"
    return _numbered(node)


class Movement(Translation):
    """Shapes, orders, parts, joins and lookups."""

    @visits(*_SHAPES, dtypes=VALUES, when=_one_dynamic)
    def reshaped(self, part: PartitionView, node: Node) -> None:
        """Visit other sizes of the same elements."""
        sizes = [size if isinstance(size, int) else -1 for size in tensor_of(node).shape]
        value = self.read(node.args[0])
        self.give(part, node, opset13.reshape(value, whole(sizes), special_zero=False))

    @visits("aten.unsqueeze", dtypes=VALUES)
    def unsqueezed(self, part: PartitionView, node: Node) -> None:
        """Visit a new dimension."""
        axis = axis_of(node, arguments_of(node)["dim"])
        self.give(part, node, opset13.unsqueeze(self.read(node.args[0]), whole([axis])))

    @visits(*_SQUEEZED, dtypes=VALUES)
    def squeezed(self, part: PartitionView, node: Node) -> None:
        """Visit dimensions of one element that fall away.

        Where sizes are dynamic, OpenVINO would take another shape for a shuffle of channels, and
        fail to compile it: there the one place is looked up.
        """
        found = arguments_of(node)
        sizes = tensor_of(found["self"]).shape
        axes = [axis for axis in axes_of(found["self"], found.get("dim")) if sizes[axis] == 1]
        value = self.read(found["self"])
        if all(isinstance(size, int) for size in sizes):
            wanted = whole(list(tensor_of(node).shape))
            value = opset13.reshape(value, wanted, special_zero=False).output(0)
        else:
            for axis in sorted(axes, reverse=True):
                value = opset13.gather(value, whole(0), whole(axis)).output(0)
        self.give(part, node, value)

    @visits(*_SAME, dtypes=VALUES, when=_idle)
    def same(self, part: PartitionView, node: Node) -> None:
        """Visit what changes nothing."""
        self.give(part, node, self.read(node.args[0]))

    @visits("aten._assert_tensor_metadata", when=_asserted)
    def asserted(self, part: PartitionView, node: Node) -> None:
        """Visit what export asserts of a dtype, which no input can change any more."""

    @visits(*_CONVERSIONS, when=_conversion)
    def conversion(self, part: PartitionView, node: Node) -> None:
        """Visit another dtype."""
        self.give(part, node, self.read(node.args[0], tensor_of(node).dtype))

    @visits(*_ORDERS, dtypes=VALUES)
    def reordered(self, part: PartitionView, node: Node) -> None:
        """Visit another order of dimensions."""
        found = arguments_of(node)
        source = found["self"]
        order = list(range(tensor_of(source).dim()))
        short = operator_name(node).split(".")[1]
        if short == "permute":
            order = [axis_of(source, dim) for dim in found["dims"]]
        elif short == "transpose":
            first, second = axis_of(source, found["dim0"]), axis_of(source, found["dim1"])
            order[first], order[second] = order[second], order[first]
        elif short == "mT":
            order[-1], order[-2] = order[-2], order[-1]
        else:
            order.reverse()
        self.give(part, node, opset13.transpose(self.read(source), whole(order)))

    @visits(*_PARTS, dtypes=VALUES, static=True)
    def parted(self, part: PartitionView, node: Node) -> None:
        """Visit a tensor that is cut along one dimension."""
        found = arguments_of(node)
        axis = axis_of(found["self"], found["dim"])
        single = operator_name(node) == "aten.unbind.int"
        lengths = [1 if single else int(one.shape[axis]) for one in node.meta["val"]]
        made = opset13.variadic_split(self.read(found["self"]), whole(axis), whole(lengths))
        for number, taken in enumerate(part.parts(node)):
            if taken is not None:
                value: Any = made.output(number)
                if single:
                    value = opset13.squeeze(value, whole([axis]))
                self.give(part, taken, value)

    @visits("aten.cat", dtypes=VALUES)
    def joined(self, part: PartitionView, node: Node) -> None:
        """Visit tensors one behind the other."""
        found = arguments_of(node)
        dtype = tensor_of(node).dtype
        # torch lets an empty vector stand among tensors of any rank.
        given = [one for one in found["tensors"] if tuple(tensor_of(one).shape) != (0,)]
        values = [self.read(one, dtype) for one in given or found["tensors"]]
        self.give(part, node, opset13.concat(values, axis_of(node, found["dim"])))

    @visits("aten.stack", dtypes=VALUES)
    def stacked(self, part: PartitionView, node: Node) -> None:
        """Visit tensors along a new dimension."""
        found = arguments_of(node)
        dtype, axis = tensor_of(node).dtype, axis_of(node, found["dim"])
        values = [
            opset13.unsqueeze(self.read(one, dtype), whole([axis])) for one in found["tensors"]
        ]
        self.give(part, node, opset13.concat(values, axis))

    @visits(*_EXPANDED, dtypes=VALUES, when=_static)
    def expanded(self, part: PartitionView, node: Node) -> None:
        """Visit dimensions that are repeated."""
        sizes = whole(list(tensor_of(node).shape))
        self.give(part, node, opset13.broadcast(self.read(node.args[0]), sizes))

    @visits("aten.repeat", dtypes=VALUES, when=_static)
    def repeated(self, part: PartitionView, node: Node) -> None:
        """Visit a tensor several times along each dimension."""
        found = arguments_of(node)
        self.give(part, node, opset13.tile(self.read(found["self"]), whole(found["repeats"])))

    @visits("aten.slice.Tensor", "aten.narrow", dtypes=VALUES)
    def sliced(self, part: PartitionView, node: Node) -> None:
        """Visit a stretch of a dimension."""
        found = arguments_of(node)
        start, step = found["start"] or 0, found.get("step", 1)
        end = start + found["length"] if "length" in found else found["end"]
        if end is None or ("length" in found and start < 0 and end == 0):
            end = torch.iinfo(torch.int64).max
        bounds = (whole([one]) for one in (start, end, step))
        axis = whole([axis_of(node, found["dim"])])
        self.give(part, node, opset13.slice(self.read(found["self"]), *bounds, axis))

    @visits("aten.select.int", dtypes=VALUES)
    def selected(self, part: PartitionView, node: Node) -> None:
        """Visit one place of a dimension."""
        found = arguments_of(node)
        axis = axis_of(found["self"], found["dim"])
        value = self.read(found["self"])
        self.give(part, node, opset13.gather(value, whole(found["index"]), whole(axis)))

    @visits("aten.flip", dtypes=VALUES)
    def flipped(self, part: PartitionView, node: Node) -> None:
        """Visit dimensions from their end to their beginning."""
        found = arguments_of(node)
        dims = [axis_of(node, dim) for dim in found["dims"]]
        least = torch.iinfo(torch.int64).min
        made: Any = self.read(found["self"])
        if dims:
            bounds = (whole([one] * len(dims)) for one in (-1, least, -1))
            made = opset13.slice(made, *bounds, whole(dims))
        self.give(part, node, made)

    @visits("aten.roll", dtypes=VALUES, when=lambda node: len(node.args) > 2 or "it has no dims")
    def rolled(self, part: PartitionView, node: Node) -> None:
        """Visit dimensions that begin elsewhere."""
        found = arguments_of(node)
        shifts, dims = ([x] if isinstance(x, int) else x for x in (found["shifts"], found["dims"]))
        value = self.read(found["self"])
        self.give(part, node, opset13.roll(value, whole(shifts), whole(dims)))

    @visits("aten.embedding", dtypes=WITH_POSITIONS, when=_numbered)
    def looked_up(self, part: PartitionView, node: Node) -> None:
        """Visit rows of a table."""
        found = arguments_of(node)
        rows = self.read(found["indices"])
        self.give(part, node, opset13.gather(self.read(found["weight"]), rows, whole(0)))

    @visits("aten.index_select", dtypes=WITH_POSITIONS | VALUES, when=_numbered)
    def chosen(self, part: PartitionView, node: Node) -> None:
        """Visit places of a dimension, known at run time."""
        found = arguments_of(node)
        axis = whole(axis_of(found["self"], found["dim"]))
        self.give(
            part, node, opset13.gather(self.read(found["self"]), self.read(found["index"]), axis)
        )

    @visits("aten.index.Tensor", dtypes=WITH_POSITIONS | VALUES, when=_one_index)
    def indexed(self, part: PartitionView, node: Node) -> None:
        """Visit places of a dimension, which may be told in several."""
        found = arguments_of(node)
        (dim,) = (i for i, one in enumerate(found["indices"]) if one is not None)
        places = self.read(found["indices"][dim])
        self.give(part, node, opset13.gather(self.read(found["self"]), places, whole(dim)))

    @visits("aten.gather", dtypes=WITH_POSITIONS | VALUES, when=_gathered)
    def gathered(self, part: PartitionView, node: Node) -> None:
        """Visit one place of a dimension for each element."""
        found = arguments_of(node)
        value, places = self.read(found["self"]), self.read(found["index"])
        axis = axis_of(node, found["dim"])
        # torch takes fewer positions than there are elements in the other dimensions. Not cut by
        # a slice: OpenVINO takes one for idle there, and fails to compile what is left.
        for dim, (size, taken) in enumerate(_sizes(node)):
            if dim != axis and size != taken:
                first = whole(list(range(int(taken))))
                value = opset13.gather(value, first, whole(dim)).output(0)
        self.give(part, node, opset13.gather_elements(value, places, axis))
