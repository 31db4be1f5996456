"""Convolutions, pools, padding and resizing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openvino
import torch
from openvino import Output, opset13, opset14
from torch.fx import Node

from lowerdeck.lowered_module import PartitionView, arguments_of, operator_name, visits
from lowerdeck.openvino.layout import ints
from lowerdeck.openvino.operators.dtypes import FLOATS, NUMBERS
from lowerdeck.openvino.translation import Translation, tensor_of

_CONVOLUTIONS = tuple(
    f"aten.conv{rank}d.{form}" for rank in (1, 2, 3) for form in ("default", "padding")
)
_TRANSPOSED = (
    "aten.conv_transpose1d.default",
    "aten.conv_transpose2d.input",
    "aten.conv_transpose3d.input",
)
_AVERAGES = ("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d")
_MAXIMA = (
    *("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d"),
    "aten.max_pool2d_with_indices",
)
_ADAPTIVE = (
    *("aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d"),
    "aten._adaptive_avg_pool2d",
)
_PADS = ("aten.constant_pad_nd", "aten.pad", "aten.reflection_pad2d", "aten.replication_pad2d")


def _batched(node: Node) -> bool | str:
    """Reject unbatched inputs."""
    image = next(int(character) for character in operator_name(node) if character.isdigit())
    rank = tensor_of(node.all_input_nodes[0]).dim()
    return rank == image + 2 or "its input has no batch dimension"


def _pool(node: Node) -> bool | str:
    arguments = arguments_of(node)
    if arguments.get("divisor_override") is not None:
        return "its divisor_override is not supported"
    if isinstance(node.meta["val"], list | tuple):
        readers = [user for user in node.users if user.args[1] == 1 and user.users]
        if readers:
            return f"{readers[0].name} reads the indices of its maxima"
    batched = _batched(node)
    if batched is True and _larger_than_image(node):
        return "its window is larger than the padded image"
    if batched is True and _exceeds_padding(arguments):
        source, result = tensor_of(node.all_input_nodes[0]), tensor_of(node)
        if not all(isinstance(size, int) for size in (*source.shape[2:], *result.shape[2:])):
            return "its windows may extend beyond the padding, because sizes are dynamic"
    return batched


def _larger_than_image(node: Node) -> bool:
    """Return whether a window is larger than the padded image, as ``ceil_mode`` allows."""
    arguments = arguments_of(node)
    sizes = tensor_of(node.all_input_nodes[0]).shape[2:]
    kernel, padding, dilation = (
        _per_dim(setting, len(sizes))
        for setting in (
            arguments["kernel_size"],
            arguments["padding"],
            arguments.get("dilation", 1),
        )
    )
    return any(
        isinstance(size, int) and step * (width - 1) + 1 > size + 2 * border
        for size, width, border, step in zip(sizes, kernel, padding, dilation, strict=True)
    )


def _exceeds_padding(arguments: dict[str, Any]) -> bool:
    """Return whether windows of an average pool may extend beyond its counted padding."""
    border = any(_per_dim(arguments["padding"], 1))
    return border and bool(arguments["ceil_mode"] and arguments.get("count_include_pad"))


def _padded(node: Node) -> bool | str:
    arguments = arguments_of(node)
    mode, filling = arguments.get("mode", "constant"), arguments.get("value") or 0
    if tensor_of(node).dtype == torch.int32 and abs(filling) > 2**24:
        return "OpenVINO pads in float32, which rounds integers beyond 2**24"
    return mode in ("constant", "reflect", "replicate") or f"its mode is {mode!r}"


def _resized(node: Node) -> bool | str:
    source, target = tensor_of(node.all_input_nodes[0]).shape[2:], tensor_of(node).shape[2:]
    factors = arguments_of(node)["scale_factors"]
    if not all(isinstance(size, int) for size in (*source, *target)):
        return "it has dynamic sizes"
    if factors is None or "nearest" in operator_name(node):
        return True
    exact = all(a * f == b for a, f, b in zip(source, factors, target, strict=True))
    return exact or "its scale factors do not give integer sizes"


class Windows(Translation):
    """Convolutions, pools, padding and resizing."""

    @visits(*_CONVOLUTIONS, *_TRANSPOSED, dtypes=FLOATS, when=_batched)
    @visits("aten.convolution", dtypes=FLOATS, ranks={1, 3, 4, 5})
    def convolution(self, part: PartitionView, node: Node) -> None:
        """Visit a convolution: plain, grouped or transposed."""
        arguments = arguments_of(node)
        weight = tensor_of(arguments["weight"])
        image = weight.dim() - 2
        stride, dilation = (
            _per_dim(arguments["stride"], image),
            _per_dim(arguments["dilation"], image),
        )
        groups = int(arguments["groups"])
        transposed = arguments.get("transposed", operator_name(node) in _TRANSPOSED)
        begin, end = _padding(arguments["padding"], weight.shape[2:], dilation)
        value, filters = self.read(arguments["input"]), self.read(arguments["weight"])
        if groups > 1:
            filters = _grouped(filters, weight.shape, groups)
        if transposed:
            output_padding = _per_dim(arguments["output_padding"], image)
            make = (
                opset13.group_convolution_backprop_data
                if groups > 1
                else opset13.convolution_backprop_data
            )
            convolved = make(
                value, filters, stride, None, begin, end, dilation, "explicit", output_padding
            )
        else:
            make = opset13.group_convolution if groups > 1 else opset13.convolution
            convolved = make(value, filters, stride, begin, end, dilation)
        if arguments["bias"] is not None:
            shape = ints([1, -1, *([1] * image)])
            bias = opset13.reshape(self.read(arguments["bias"]), shape, special_zero=False)
            convolved = opset13.add(convolved, bias)
        self.give(part, node, convolved)

    @visits(*_AVERAGES, dtypes=FLOATS, when=_pool)
    def average(self, part: PartitionView, node: Node) -> None:
        """Visit an average pool."""
        arguments = arguments_of(node)
        image = tensor_of(node).dim() - 2
        kernel = _per_dim(arguments["kernel_size"], image)
        stride = _per_dim(arguments["stride"] or kernel, image)
        padding = _per_dim(arguments["padding"], image)
        exclude_pad = not arguments["count_include_pad"]
        value = self.read(arguments["self"])
        if _exceeds_padding(arguments):
            # torch counts padding, but nothing beyond it: pad explicitly as far as windows reach,
            # and exclude elements beyond.
            sizes = zip(
                *(tensor_of(arguments["self"]).shape[2:], tensor_of(node).shape[2:]),
                *(kernel, stride, padding),
                strict=True,
            )
            end = [min(p, (w - 1) * t + k - size - p) for size, w, k, t, p in sizes]
            zero = self.read(0.0, tensor_of(node).dtype)
            value = opset13.pad(
                *(value, ints([0, 0, *padding]), ints([0, 0, *end]), "constant", zero)
            ).output(0)
            padding, exclude_pad = [0] * image, True
        self.give(
            *(part, node),
            opset14.avg_pool(
                *(value, stride, padding, padding, kernel, exclude_pad),
                rounding_type=_rounding(arguments),
            ),
        )

    @visits(*_MAXIMA[:-1], dtypes=FLOATS, when=_pool)
    @visits(_MAXIMA[-1], dtypes=FLOATS | {torch.int64}, when=_pool)
    def maximum_of_windows(self, part: PartitionView, node: Node) -> None:
        """Visit a max pool."""
        arguments = arguments_of(node)
        image = tensor_of(arguments["self"]).dim() - 2
        kernel = _per_dim(arguments["kernel_size"], image)
        stride = _per_dim(arguments["stride"] or kernel, image)
        padding, dilation = (
            _per_dim(arguments["padding"], image),
            _per_dim(arguments["dilation"], image),
        )
        pooled = opset14.max_pool(
            *(self.read(arguments["self"]), stride, dilation, padding, padding, kernel),
            rounding_type=_rounding(arguments),
        )
        has_indices = isinstance(node.meta["val"], list | tuple)
        output = part.parts(node)[0] if has_indices else node
        if output is not None:
            self.give(part, output, pooled.output(0))

    @visits(*_ADAPTIVE, dtypes=FLOATS, when=_batched)
    def adaptive(self, part: PartitionView, node: Node) -> None:
        """Visit an adaptive average pool."""
        arguments = arguments_of(node)
        shape = ints(list(tensor_of(node).shape[2:]))
        self.give(part, node, opset13.adaptive_avg_pool(self.read(arguments["self"]), shape))

    @visits(*_PADS, dtypes=NUMBERS, when=_padded)
    def padded(self, part: PartitionView, node: Node) -> None:
        """Visit padding; negative amounts crop."""
        arguments = arguments_of(node)
        pads = arguments["pad"] if "pad" in arguments else arguments["padding"]
        rank = tensor_of(node).dim()
        # torch lists the last dimension first.
        begin = [0] * (rank - len(pads) // 2) + list(reversed(pads[::2]))
        end = [0] * (rank - len(pads) // 2) + list(reversed(pads[1::2]))
        short = operator_name(node).split(".")[1]
        mode = {"reflection_pad2d": "reflect", "replication_pad2d": "replicate"}.get(
            short, arguments.get("mode", "constant")
        )
        filling = None
        if mode == "constant":
            filling = self.read(arguments["value"] or 0, tensor_of(node).dtype)
        form = "edge" if mode == "replicate" else mode
        self.give(
            *(part, node),
            opset13.pad(self.read(arguments.get("self")), ints(begin), ints(end), form, filling),
        )

    @visits("aten.upsample_nearest2d.vec", dtypes=FLOATS, when=_resized)
    def nearest(self, part: PartitionView, node: Node) -> None:
        """Visit a nearest-neighbour resize."""
        arguments = arguments_of(node)
        value = self.read(arguments["input"])
        sizes = tensor_of(arguments["input"]).shape[2:], tensor_of(node).shape[2:]
        factors = arguments["scale_factors"] or (None, None)
        indices_by_dim = [
            _nearest(*sizes_and_factor) for sizes_and_factor in zip(*sizes, factors, strict=True)
        ]
        if all(
            torch.equal(indices, _nearest_of_openvino(*size_pair))
            for indices, size_pair in zip(indices_by_dim, zip(*sizes, strict=True), strict=True)
        ):
            output = opset13.interpolate(
                *(value, ints(list(sizes[1])), "nearest", "sizes"),
                coordinate_transformation_mode="asymmetric",
                nearest_mode="floor",
                axes=ints([2, 3]),
            )
        else:
            output = value
            for axis, indices in enumerate(indices_by_dim, start=2):
                output = opset13.gather(output, ints(indices.tolist()), ints(axis))
        self.give(part, node, output)

    @visits("aten.upsample_bilinear2d.vec", dtypes=FLOATS, when=_resized)
    def resized(self, part: PartitionView, node: Node) -> None:
        """Visit a bilinear resize."""
        arguments = arguments_of(node)
        corners = "align_corners" if arguments["align_corners"] else "half_pixel"
        interpolated = opset13.interpolate(
            *(self.read(arguments["input"]), ints(list(tensor_of(node).shape[2:]))),
            *("linear_onnx", "sizes"),
            coordinate_transformation_mode=corners,
            axes=ints([2, 3]),
        )
        self.give(part, node, interpolated)

    @visits("aten.pixel_shuffle", "aten.pixel_unshuffle", dtypes=FLOATS, ranks={4})
    def shuffled(self, part: PartitionView, node: Node) -> None:
        """Visit ``pixel_shuffle`` or ``pixel_unshuffle``."""
        arguments = arguments_of(node)
        value = self.read(arguments["self"])
        if "upscale_factor" in arguments:
            image = opset13.depth_to_space(value, "depth_first", int(arguments["upscale_factor"]))
        else:
            image = opset13.space_to_depth(
                value, "depth_first", int(arguments["downscale_factor"])
            )
        self.give(part, node, image)


def _rounding(arguments: dict[str, Any]) -> str:
    """Return OpenVINO's name of the rounding that torch applies to the window count."""
    return "ceil_torch" if arguments["ceil_mode"] else "floor"


def _per_dim(setting: int | Sequence[int], count: int) -> list[int]:
    """Return a setting as one number per dimension."""
    values = [setting] if isinstance(setting, int) else list(setting)
    return values * count if len(values) == 1 else values


def _padding(
    setting: str | int | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[list[int], list[int]]:
    if setting == "valid":
        return [0] * len(kernel), [0] * len(kernel)
    if setting == "same":
        total = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        return [amount // 2 for amount in total], [amount - amount // 2 for amount in total]
    per_side = _per_dim(setting, len(kernel)) if not isinstance(setting, str) else []
    return per_side, list(per_side)


def _nearest(source: int, target: int, factor: float | None) -> torch.Tensor:
    """Return the indices that torch selects along a dimension, computed by torch."""
    line = torch.arange(source, dtype=torch.float32).view(1, 1, source, 1)
    sizes, factors = ([target, 1], None) if factor is None else (None, [factor, 1.0])
    indices: torch.Tensor = torch.ops.aten.upsample_nearest2d.vec(line, sizes, factors)
    return indices.flatten().long()


def _nearest_of_openvino(source: int, target: int) -> torch.Tensor:
    """Return the indices that OpenVINO selects, which divides by a rounded factor."""
    factor = torch.tensor(float(target)) / source
    places = torch.arange(target, dtype=torch.float32)
    return (places if source == target else places / factor).long().clamp(max=source - 1)


def _grouped(filters: Output, shape: torch.Size, groups: int) -> openvino.Node:
    sizes = [groups, int(shape[0]) // groups, *shape[1:]]
    return opset13.reshape(filters, ints(sizes), special_zero=False)
