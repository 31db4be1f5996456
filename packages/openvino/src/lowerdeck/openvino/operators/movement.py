"""Operators that move or copy elements."""

from __future__ import annotations

from typing import Any

import torch
from openvino import opset13
from torch.fx import Node

from lowerdeck.lowered_module import PartitionView, arguments_of, operator_name, visits
from lowerdeck.openvino.layout import ints
from lowerdeck.openvino.operators.dtypes import VALUES, WITH_INDICES
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
    return not sizes or "it has dynamic sizes"


def _idle(node: Node) -> bool | str:
    return not arguments_of(node).get("train") or "its dropout is active"


def _conversion(node: Node) -> bool | str:
    for dtype in (tensor_of(node.all_input_nodes[0]).dtype, tensor_of(node).dtype):
        if dtype == torch.int64:
            return "OpenVINO computes int64 in int32"
        if dtype not in VALUES:
            return f"dtype {dtype} is not supported"
    return True


def _asserted(node: Node) -> bool | str:
    """Accept ``_assert_tensor_metadata`` of supported dtypes."""
    dtype = tensor_of(node.all_input_nodes[0]).dtype
    return dtype in TYPES or f"dtype {dtype} is not supported"


def _is_table_supported(node: Node) -> bool | str:
    """Accept lookups in tables of supported dtypes, which include integers and bool."""
    arguments = arguments_of(node)
    table = tensor_of(arguments["weight"] if "weight" in arguments else arguments["self"])
    return table.dtype in VALUES or f"dtype {table.dtype} is not supported"


def _sizes(node: Node) -> list[tuple[Any, Any]]:
    """Return the sizes of a gathered tensor and of its index, as pairs by dimension."""
    arguments = arguments_of(node)
    shapes = tensor_of(arguments["self"]).shape, tensor_of(arguments["index"]).shape
    return list(zip(*shapes, strict=True))


def _gathered(node: Node) -> bool | str:
    """Accept ``gather`` if the other dimensions are static or have equal sizes in the index."""
    axis = axis_of(node, arguments_of(node)["dim"])
    for dim, sizes in enumerate(_sizes(node)):
        is_static = all(isinstance(size, int) for size in sizes)
        if dim != axis and not is_static and str(sizes[0]) != str(sizes[1]):
            return f"dimension {dim} has size {sizes[0]}, the index {sizes[1]}: make both static"
    return _is_table_supported(node)


def _one_index(node: Node) -> bool | str:
    """Accept indexing one dimension by integers; results of masks have data-dependent sizes."""
    indices = [index for index in arguments_of(node)["indices"] if index is not None]
    if len(indices) != 1 or tensor_of(indices[0]).dtype not in (torch.int32, torch.int64):
        return "it does not index one dimension with integers"
    return _is_table_supported(node)


class Movement(Translation):
    """Views, permutations, slices, concatenations and lookups."""

    @visits(*_SHAPES, dtypes=VALUES, when=_one_dynamic)
    def reshaped(self, part: PartitionView, node: Node) -> None:
        """Visit ``view`` or another reshape."""
        sizes = [size if isinstance(size, int) else -1 for size in tensor_of(node).shape]
        value = self.read(node.args[0])
        self.give(part, node, opset13.reshape(value, ints(sizes), special_zero=False))

    @visits("aten.unsqueeze", dtypes=VALUES)
    def unsqueezed(self, part: PartitionView, node: Node) -> None:
        """Visit ``unsqueeze``."""
        axis = axis_of(node, arguments_of(node)["dim"])
        self.give(part, node, opset13.unsqueeze(self.read(node.args[0]), ints([axis])))

    @visits(*_SQUEEZED, dtypes=VALUES)
    def squeezed(self, part: PartitionView, node: Node) -> None:
        """Visit ``squeeze``.

        With dynamic sizes a gather is used, because OpenVINO infers a wrong shape for the squeeze
        in a channel shuffle and fails to compile it.
        """
        arguments = arguments_of(node)
        sizes = tensor_of(arguments["self"]).shape
        axes = [
            axis for axis in axes_of(arguments["self"], arguments.get("dim")) if sizes[axis] == 1
        ]
        value = self.read(arguments["self"])
        if all(isinstance(size, int) for size in sizes):
            shape = ints(list(tensor_of(node).shape))
            value = opset13.reshape(value, shape, special_zero=False).output(0)
        else:
            for axis in sorted(axes, reverse=True):
                value = opset13.gather(value, ints(0), ints(axis)).output(0)
        self.give(part, node, value)

    @visits(*_SAME, dtypes=VALUES, when=_idle)
    def same(self, part: PartitionView, node: Node) -> None:
        """Visit a no-op or a copy."""
        self.give(part, node, self.read(node.args[0]))

    @visits("aten._assert_tensor_metadata", when=_asserted)
    def asserted(self, part: PartitionView, node: Node) -> None:
        """Skip an assertion: a partition's dtypes are fixed."""

    @visits(*_CONVERSIONS, when=_conversion)
    def conversion(self, part: PartitionView, node: Node) -> None:
        """Visit a conversion of dtype."""
        self.give(part, node, self.read(node.args[0], tensor_of(node).dtype))

    @visits(*_ORDERS, dtypes=VALUES)
    def reordered(self, part: PartitionView, node: Node) -> None:
        """Visit a permutation of dimensions."""
        arguments = arguments_of(node)
        source = arguments["self"]
        order = list(range(tensor_of(source).dim()))
        short = operator_name(node).split(".")[1]
        if short == "permute":
            order = [axis_of(source, dim) for dim in arguments["dims"]]
        elif short == "transpose":
            first, second = axis_of(source, arguments["dim0"]), axis_of(source, arguments["dim1"])
            order[first], order[second] = order[second], order[first]
        elif short == "mT":
            order[-1], order[-2] = order[-2], order[-1]
        else:
            order.reverse()
        self.give(part, node, opset13.transpose(self.read(source), ints(order)))

    @visits(*_PARTS, dtypes=VALUES, static=True)
    def parted(self, part: PartitionView, node: Node) -> None:
        """Visit ``split``, ``chunk`` or ``unbind``."""
        arguments = arguments_of(node)
        axis = axis_of(arguments["self"], arguments["dim"])
        single = operator_name(node) == "aten.unbind.int"
        lengths = [1 if single else int(output.shape[axis]) for output in node.meta["val"]]
        split = opset13.variadic_split(self.read(arguments["self"]), ints(axis), ints(lengths))
        for number, output in enumerate(part.parts(node)):
            if output is not None:
                value: Any = split.output(number)
                if single:
                    value = opset13.squeeze(value, ints([axis]))
                self.give(part, output, value)

    @visits("aten.cat", dtypes=VALUES)
    def joined(self, part: PartitionView, node: Node) -> None:
        """Visit ``cat``."""
        arguments = arguments_of(node)
        dtype = tensor_of(node).dtype
        # torch accepts an empty vector among tensors of any rank.
        nonempty = [
            tensor for tensor in arguments["tensors"] if tuple(tensor_of(tensor).shape) != (0,)
        ]
        values = [self.read(tensor, dtype) for tensor in nonempty or arguments["tensors"]]
        self.give(part, node, opset13.concat(values, axis_of(node, arguments["dim"])))

    @visits("aten.stack", dtypes=VALUES)
    def stacked(self, part: PartitionView, node: Node) -> None:
        """Visit ``stack``."""
        arguments = arguments_of(node)
        dtype, axis = tensor_of(node).dtype, axis_of(node, arguments["dim"])
        values = [
            opset13.unsqueeze(self.read(tensor, dtype), ints([axis]))
            for tensor in arguments["tensors"]
        ]
        self.give(part, node, opset13.concat(values, axis))

    @visits(*_EXPANDED, dtypes=VALUES, when=_static)
    def expanded(self, part: PartitionView, node: Node) -> None:
        """Visit ``expand``."""
        sizes = ints(list(tensor_of(node).shape))
        self.give(part, node, opset13.broadcast(self.read(node.args[0]), sizes))

    @visits("aten.repeat", dtypes=VALUES, when=_static)
    def repeated(self, part: PartitionView, node: Node) -> None:
        """Visit ``repeat``."""
        arguments = arguments_of(node)
        self.give(
            part, node, opset13.tile(self.read(arguments["self"]), ints(arguments["repeats"]))
        )

    @visits("aten.slice.Tensor", "aten.narrow", dtypes=VALUES)
    def sliced(self, part: PartitionView, node: Node) -> None:
        """Visit ``slice``."""
        arguments = arguments_of(node)
        start, step = arguments["start"] or 0, arguments.get("step", 1)
        end = start + arguments["length"] if "length" in arguments else arguments["end"]
        if end is None or ("length" in arguments and start < 0 and end == 0):
            end = torch.iinfo(torch.int64).max
        bounds = (ints([bound]) for bound in (start, end, step))
        axis = ints([axis_of(node, arguments["dim"])])
        self.give(part, node, opset13.slice(self.read(arguments["self"]), *bounds, axis))

    @visits("aten.select.int", dtypes=VALUES)
    def selected(self, part: PartitionView, node: Node) -> None:
        """Visit ``select``."""
        arguments = arguments_of(node)
        axis = axis_of(arguments["self"], arguments["dim"])
        value = self.read(arguments["self"])
        self.give(part, node, opset13.gather(value, ints(arguments["index"]), ints(axis)))

    @visits("aten.flip", dtypes=VALUES)
    def flipped(self, part: PartitionView, node: Node) -> None:
        """Visit ``flip``."""
        arguments = arguments_of(node)
        dims = [axis_of(node, dim) for dim in arguments["dims"]]
        least = torch.iinfo(torch.int64).min
        value: Any = self.read(arguments["self"])
        if dims:
            bounds = (ints([bound] * len(dims)) for bound in (-1, least, -1))
            value = opset13.slice(value, *bounds, ints(dims))
        self.give(part, node, value)

    @visits("aten.roll", dtypes=VALUES, when=lambda node: len(node.args) > 2 or "it has no dims")
    def rolled(self, part: PartitionView, node: Node) -> None:
        """Visit ``roll``."""
        arguments = arguments_of(node)
        shifts, dims = (
            [x] if isinstance(x, int) else x for x in (arguments["shifts"], arguments["dims"])
        )
        value = self.read(arguments["self"])
        self.give(part, node, opset13.roll(value, ints(shifts), ints(dims)))

    @visits("aten.embedding", dtypes=WITH_INDICES, when=_is_table_supported)
    def looked_up(self, part: PartitionView, node: Node) -> None:
        """Visit ``embedding``."""
        arguments = arguments_of(node)
        rows = self.read(arguments["indices"])
        self.give(part, node, opset13.gather(self.read(arguments["weight"]), rows, ints(0)))

    @visits("aten.index_select", dtypes=WITH_INDICES | VALUES, when=_is_table_supported)
    def chosen(self, part: PartitionView, node: Node) -> None:
        """Visit ``index_select``."""
        arguments = arguments_of(node)
        axis = ints(axis_of(arguments["self"], arguments["dim"]))
        self.give(
            part,
            node,
            opset13.gather(self.read(arguments["self"]), self.read(arguments["index"]), axis),
        )

    @visits("aten.index.Tensor", dtypes=WITH_INDICES | VALUES, when=_one_index)
    def indexed(self, part: PartitionView, node: Node) -> None:
        """Visit indexing of one dimension by a tensor of any rank."""
        arguments = arguments_of(node)
        (dim,) = (i for i, index in enumerate(arguments["indices"]) if index is not None)
        indices = self.read(arguments["indices"][dim])
        self.give(part, node, opset13.gather(self.read(arguments["self"]), indices, ints(dim)))

    @visits("aten.gather", dtypes=WITH_INDICES | VALUES, when=_gathered)
    def gathered(self, part: PartitionView, node: Node) -> None:
        """Visit ``gather``."""
        arguments = arguments_of(node)
        value, indices = self.read(arguments["self"]), self.read(arguments["index"])
        axis = axis_of(node, arguments["dim"])
        # torch accepts smaller indices in other dimensions. OpenVINO removes a slice as a no-op
        # and fails to compile.
        for dim, (size, length) in enumerate(_sizes(node)):
            if dim != axis and size != length:
                first = ints(list(range(int(length))))
                value = opset13.gather(value, first, ints(dim)).output(0)
        self.give(part, node, opset13.gather_elements(value, indices, axis))
