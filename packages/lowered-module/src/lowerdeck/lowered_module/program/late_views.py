"""Move views that merge dynamic sizes as late as possible.

``flatten(2)`` of images with dynamic batch, height and width is free for a kernel, but backends
whose reshapes infer only one dynamic size cannot delegate it. Operators on each position (a linear
layer, a norm over channels, a sum) commute with such a view, which then cancels with the view back
to images. A one-dimensional convolution becomes a two-dimensional one on images of one row.

Images of dynamic sizes that are resized become channels-last, which kernels resize in a sixth of
the time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from lowerdeck.lowered_module.program.copies import rewritten
from lowerdeck.lowered_module.program.masks import write_out
from lowerdeck.lowered_module.program.merged_sizes import (
    SEVERAL,
    Parts,
    Sizes,
    equal_sizes,
    flat_sizes,
    is_equal,
    is_like,
    is_one,
    merged_sizes,
    numbered,
    shape_of,
    sizes_merged_by,
    spare_ones,
    whole_parts,
    with_size_at,
    without_ones,
)
from lowerdeck.lowered_module.program.plain_sizes import number_of
from lowerdeck.lowered_module.program.view_rules import (
    ATTENTION,
    BROADCASTS,
    MOVES,
    PRODUCTS,
    RULES,
    VIEWS,
    broadcast_parts,
    product_parts,
    unmerged_sizes,
)
from lowerdeck.torch_base import arguments_of, expression_of, is_channels_last, new_fake, varies

_aten = torch.ops.aten
_SPLITS = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})
_LINES: Mapping[Any, Any] = {
    _aten.conv1d.default: _aten.conv2d.default,
    _aten.conv1d.padding: _aten.conv2d.padding,
    _aten.convolution.default: _aten.convolution.default,
}
"""Convolutions over one dimension, and what does the same over two."""
_RESIZES = frozenset({_aten.upsample_bilinear2d.vec, _aten.upsample_nearest2d.vec})


def with_late_views(program: ExportedProgram) -> ExportedProgram:
    """Return a program that merges dynamic sizes late, if that saves views.

    Args:
        program: A functional program; not changed, and returned itself if it merges none.
    """
    may_change = any(map(_may_change, program.graph.nodes))
    return rewritten(program, lambda graph: _Pass(graph).run()) if may_change else program


def _may_change(node: Node) -> bool:
    if node.target in _LINES:
        return _is_line(node)
    return _is_left_resize(node) or (node.target in VIEWS and sizes_merged_by(node) is not None)


@dataclass(frozen=True, slots=True)
class _Fine:
    """A tensor whose view is another one.

    Attributes:
        parts: For each dimension of the view, the sizes that it merges.
    """

    node: Node
    parts: Parts


class _Pass:
    """Rewriter of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._held: dict[Node, _Fine] = {}
        self._views: dict[Node, Node] = {}
        self._sizes: dict[Any, Node] = {}
        self._values: dict[Any, torch.Tensor] = {}
        self._replaced: set[Node] = set()

    def run(self) -> bool:
        """Rewrite the graph; return whether anything changed."""
        lines = [node for node in self._graph.nodes if node.target in _LINES and _is_line(node)]
        for node in lines:
            self._widen(node)
        for node in self._graph.nodes:
            if node.target in _ASKING:
                _give_asked_sizes(node)
        moved = [self._is_moved_before_split(node) for node in list(self._graph.nodes)]
        parts = unmerged_sizes(self._graph)
        wanted_nodes = _wanted(self._graph, parts)
        attentions = [node for node in wanted_nodes if node.target is ATTENTION]
        if attentions:
            for node in attentions:
                write_out(node, None, {})
                self._graph.erase_node(node)
            parts = unmerged_sizes(self._graph)
            wanted_nodes = _wanted(self._graph, parts)
        if lines or any(moved) or wanted_nodes:
            self._merge_late(parts, wanted_nodes)
        return bool(lines or any(moved) or wanted_nodes) | _lay_out(self._graph)

    def _is_moved_before_split(self, node: Node) -> bool:
        """Move an operation before a view that a later one undoes; return whether that was done.

        Swin splits windows into images and windows of an image to add the mask of the latter.
        """
        view = next((x for x in node.all_input_nodes if x.target in _SPLITS), None)
        if view is None or not _is_undone(node, view, view):
            return False
        source: Any = view.args[0]
        parts = merged_sizes(shape_of(view), shape_of(source))
        if parts is None or len(_dynamic(flat_sizes(parts))) < SEVERAL:
            return False
        if not equal_sizes(flat_sizes(parts), shape_of(view)):
            # Static sizes are split or merged as well.
            return False
        with self._graph.inserting_before(node):
            operands = [
                source if x is view else self._merged_operand(x, view, parts) for x in node.args
            ]
            if None in operands:
                return False
            result = self._call(node, node.target, tuple(operands), shape_of(source), node.kwargs)
            split = self._call(node, view.target, (result, *view.args[1:]), shape_of(view))
        for user in list(node.users):
            if user.target in VIEWS:
                user.replace_all_uses_with(result)
                self._graph.erase_node(user)
        node.replace_all_uses_with(split)
        self._graph.erase_node(node)
        self._replaced |= {view, split}
        return True

    def _merged_operand(self, operand: Any, view: Node, parts: Parts) -> Any:
        """Return an operand that broadcasts against a view's source; None if there is none."""
        if not _is_tensor(operand):
            return operand
        asked: Any = view.args[1]
        before = (1,) * (len(asked) - len(shape_of(operand))) + shape_of(operand)
        wide: list[Any] = []
        shape: list[Any] = []
        for part, size in zip(parts, shape_of(view.args[0]), strict=True):
            is_unit = all(map(is_one, before[len(wide) : len(wide) + len(part)]))
            wide += [1] * len(part) if is_unit else part
            shape.append(1 if is_unit else size)
        sizes = [
            new if is_one(new) else -1 if equal_sizes([old], [new]) else asked[at]
            for at, (old, new) in enumerate(zip(before, wide, strict=True))
        ]
        # Only a size that the operand already has can be kept.
        is_known = all(a != -1 or not is_one(b) for a, b in zip(sizes, before, strict=True))
        if sum(map(varies, shape)) > 1 or not is_known:
            return None
        repeated = self._call(operand, _aten.expand_copy.default, (operand, sizes), wide)
        merged = [-1 if varies(size) else int(size) for size in shape]
        return self._call(operand, _aten.view.default, (repeated, merged), shape)

    def _merge_late(self, parts: Mapping[Node, Parts], wanted_nodes: Container[Node]) -> None:
        for node in list(self._graph.nodes):
            if node.op not in {"call_function", "output"}:
                continue
            if isinstance(node.meta.get("val"), torch.SymInt):
                self._sizes.setdefault(expression_of(node.meta["val"]), node)
            with self._graph.inserting_before(node):
                if not self._is_passed(node, parts, wanted_nodes):
                    for source in node.all_input_nodes:
                        if source in self._held:
                            node.replace_input_with(source, self._merged(source))
        for node in reversed(self._graph.nodes):
            is_size = isinstance(node.meta.get("val"), torch.SymInt) and node.op != "placeholder"
            if not node.users and (is_size or node in self._replaced):
                self._graph.erase_node(node)

    def _widen(self, node: Node) -> None:
        """Replace a one-dimensional convolution by a two-dimensional one."""
        args = arguments_of(node)
        between, less = _shortened(node)
        last = between[-1]
        with self._graph.inserting_before(node):
            image, weight = (
                self._call(
                    one, _aten.unsqueeze.default, (one, 2), with_size_at(shape_of(one), 2, 1)
                )
                for one in (args["input"], args["weight"])
            )
            args |= {"input": image, "weight": weight}
            if less:
                # Do not compute elements that a slice drops.
                padding = int(args["padding"][0])
                sides = (padding, padding - less)
                length = shape_of(image)[3] + sum(sides)
                shape = (*shape_of(image)[:3], length)
                args["input"] = self._call(
                    image, _aten.constant_pad_nd.default, (image, [*sides, 0, 0]), shape
                )
                args["padding"] = [0]
            for name, other in _SETTINGS.items():
                if isinstance(args.get(name), (list, tuple)):
                    args[name] = [other, *args[name]]
            target = _LINES[node.target]
            widened = self._call(
                node, target, tuple(args.values()), with_size_at(shape_of(last), 2, 1)
            )
            line = self._call(node, _aten.squeeze.dim, (widened, 2), shape_of(last))
        last.replace_all_uses_with(line)
        for passed in reversed(between):
            self._graph.erase_node(passed)

    def _is_passed(
        self, node: Node, parts: Mapping[Node, Parts], wanted_nodes: Container[Node]
    ) -> bool:
        """Keep a node's result unmerged, or replace a view; return whether that was done."""
        if node.target in VIEWS:
            return self._is_view_passed(node, wanted_nodes)
        held = [source for source in node.all_input_nodes if source in self._held]
        is_due = node in wanted_nodes or node.target in MOVES or len(held) > 1
        if node not in parts or not (held and is_due):
            return False
        if node.target in PRODUCTS:
            return node in wanted_nodes and self._is_product_passed(node)
        args = arguments_of(node)
        if node.target in BROADCASTS:
            result = broadcast_parts(node, {source: self._held[source].parts for source in held})
            if result is None:
                return False
            target, changed = node.target, dict[str, Any]()
            nodes = [self._held[source].node for source in held]
            sized = next(n for n in nodes if equal_sizes(shape_of(n), flat_sizes(result)))
            for name in list(args)[:2]:
                if isinstance(args[name], Node):
                    args[name] = self._aligned(args[name], node, result, sized)
        else:
            fine = self._held.get(cast("Node", node.args[0]))
            call = None if fine is None else RULES[node.target](node, fine.parts)
            if fine is None or call is None:
                return False
            target, changed, result = call
            tensor = {next(iter(args)): fine.node}
            args = {**(args if target is node.target else {}), **tensor, **changed}
        kwargs = {name: argument for name, argument in args.items() if name in node.kwargs}
        count = max([len(node.args), *(1 + list(args).index(name) for name in changed)])
        values = tuple(args.values())[:count]
        merged = self._call(node, target, values, flat_sizes(result), kwargs)
        self._held[node] = _Fine(merged, result)
        self._replaced.add(node)
        return True

    def _is_product_passed(self, node: Node) -> bool:
        first, other = cast("tuple[Node, Node]", node.args)
        for operand in filter(self._held.__contains__, (first, other)):
            self._drop_ones(operand)
        held = {x: self._held[x].parts for x in (first, other) if x in self._held}
        parts = product_parts(node, held)
        if parts is None:
            return False
        at = len(parts) - 2
        if len(parts[at]) == 1:
            other = self._held[other].node
        elif other in held:
            other = self._merged(other)
        for _ in parts[at][1:]:
            shape = with_size_at(shape_of(other), at, 1)
            other = self._call(other, _aten.unsqueeze.default, (other, at), shape)
        args = self._held[first].node, other
        product = self._call(node, _aten.matmul.default, args, flat_sizes(parts))
        self._held[node] = _Fine(product, parts)
        self._replaced.add(node)
        return True

    def _drop_ones(self, node: Node) -> None:
        """Drop sizes of 1 that a view merges into others, as ``einsum`` leaves them."""
        fine = self._held[node]
        ones = [
            number
            for part, numbers in zip(fine.parts, numbered(fine.parts), strict=True)
            for size, number in zip(part, numbers, strict=True)
            if len(part) > 1 and is_one(size)
        ]
        if ones:
            parts = without_ones(fine.parts)
            args = (fine.node, ones)
            squeezed = self._call(node, _aten.squeeze.dims, args, flat_sizes(parts))
            self._held[node] = _Fine(squeezed, parts)

    def _is_view_passed(self, node: Node, wanted_nodes: Container[Node]) -> bool:
        source: Any = node.args[0]
        fine = self._held.get(source)
        if fine is not None:
            source = fine.node
            merged = merged_sizes(shape_of(source), shape_of(node))
        else:
            merged = sizes_merged_by(node)
        if merged is not None and (node in wanted_nodes or _is_moved(node)):
            flat = flat_sizes(merged)
            if not equal_sizes(shape_of(source), flat):
                source = self._view(node, source, flat, source)
            self._held[node] = _Fine(source, merged)
        elif fine is None:
            return False
        else:
            if not equal_sizes(shape_of(source), shape_of(node)):
                source = self._view(node, source, shape_of(node), source)
            node.replace_all_uses_with(source)
        self._replaced.add(node)
        return True

    def _aligned(self, operand: Node, node: Node, parts: Parts, sized: Node) -> Node:
        """Return an operand of a broadcast with the unmerged dimensions of the result."""
        fine = self._held.get(operand, _Fine(operand, whole_parts(operand)))
        source, flat = fine.node, flat_sizes(parts)
        if is_like(operand, node):
            same = equal_sizes(shape_of(source), flat)
            return source if same else self._view(operand, source, flat, sized)
        missing = len(parts) - len(fine.parts)
        for axis in reversed(range(len(fine.parts))):
            at = len(flat_sizes(fine.parts[:axis]))
            for _ in range(len(parts[missing + axis]) - len(fine.parts[axis])):
                shape = with_size_at(shape_of(source), at, 1)
                source = self._call(source, _aten.unsqueeze.default, (source, at), shape)
        return source

    def _merged(self, node_before: Node) -> Node:
        """Return the merged view of an unmerged tensor."""
        if node_before not in self._views:
            fine = self._held[node_before]
            ones = spare_ones(fine.parts)
            if ones:
                args = (fine.node, ones)
                squeezed = self._call(node_before, _aten.squeeze.dims, args, shape_of(node_before))
            else:
                squeezed = self._view(node_before, fine.node, shape_of(node_before), fine.node)
            self._views[node_before] = squeezed
        return self._views[node_before]

    def _view(self, like: Node, source: Any, shape: Sizes, sized: Node) -> Node:
        """Return a view; its sizes are taken from the program's nodes, or from a tensor."""
        sizes: list[Any] = []
        for size in shape:
            expression = expression_of(size)
            if not varies(size):
                sizes.append(int(size))
            elif expression in self._sizes:
                sizes.append(self._sizes[expression])
            elif -1 not in sizes:
                sizes.append(-1)
            else:
                sizes.append(self._product(expression, sized))
        if source.target in VIEWS:
            source = source.args[0]
        return self._call(like, _aten.view.default, (source, sizes), shape)

    def _product(self, expression: Any, sized: Node) -> Any:
        """Return the node of a size of a tensor, or of a product of sizes."""
        shape = [expression_of(size) for size in shape_of(sized)]
        for first, last in combinations(range(len(shape) + 1), 2):
            if is_equal(math.prod(shape[first:last]), expression):
                return self._product_of(sized, range(first, last))
        raise AssertionError(f"{expression} is not a product of {shape}")

    def _product_of(self, sized: Node, dims: Sequence[int]) -> Any:
        found: Any = None
        for dim in dims:
            size = unit = shape_of(sized)[dim]
            if is_one(size):
                continue
            if varies(size):
                unit = self._graph.call_function(_aten.sym_size.int, (sized, dim))
                unit.meta = {"val": size}
                self._sizes.setdefault(expression_of(size), unit)
            if found is not None:
                product = self._graph.call_function(operator.mul, (found, unit))
                product.meta = {"val": number_of(found) * size}
                unit = product
            found = unit
        return found

    def _call(
        self,
        like: Node,
        target: Any,
        args: tuple[Any, ...],
        shape: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> Node:
        """Add a call whose result differs from another one only in sizes."""
        call = self._graph.call_function(target, args, dict(kwargs or {}))
        before = like.meta["val"]
        key = (before.dtype, *map(expression_of, shape))
        if key not in self._values:
            self._values[key] = new_fake(before, shape)
        call.meta = {**like.meta, "val": self._values[key]}
        return call


_SETTINGS = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}


_ASKING = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)


def _give_asked_sizes(view: Node) -> None:
    """Replace the inferred sizes of a view by the requested ones, which torch has as quotients."""
    asked: Any = view.args[1]
    shape = shape_of(view)
    sizes = [
        was if type(size) is int and size == -1 else number_of(size)
        for size, was in zip(asked, shape, strict=True)
    ]
    if list(map(expression_of, sizes)) != list(map(expression_of, shape)):
        view.meta["val"] = new_fake(view.meta["val"], sizes)


def _shortened(node: Node) -> tuple[list[Node], int]:
    """Return a convolution shortened by a slice that drops some of its end, and by how many.

    Speech encoders (wav2vec 2.0) do so after kernels of even size.
    """
    args = arguments_of(node)
    chain_ = [node]
    while len(chain_[-1].users) == 1:
        chain_ += chain_[-1].users
        if chain_[-1].target is not _aten.slice.Tensor or not is_like(chain_[-1], node):
            break
    padding, stride = args["padding"], args["stride"]
    if isinstance(padding, str) or list(stride) != [1] or args.get("transposed"):
        return [node], 0
    if chain_[-1].target is _aten.slice.Tensor:
        part: Any = arguments_of(chain_[-1])
        is_plain = (part["dim"] % 3, part["start"] or 0, part["step"]) == (2, 0, 1)
        less = -part["end"] if is_plain and isinstance(part["end"], int) else 0
        if 0 < less <= padding[0]:
            return chain_, less
    return [node], 0


def _is_undone(node: Node, operand: Node, view: Node) -> bool:
    """Return whether one operand is the largest, and readers undo a view or do likewise."""
    if node.target not in BROADCASTS:
        return False
    source: Any = view.args[0]
    alike = [x for x in node.all_input_nodes if _is_tensor(x) and is_like(x, node)]
    return alike == [operand] and all(
        is_like(user, source) if user.target in VIEWS else _is_undone(user, node, view)
        for user in node.users
    )


def _is_tensor(operand: Any) -> bool:
    return isinstance(operand, Node) and isinstance(operand.meta["val"], torch.Tensor)


def _wanted(graph: Graph, parts: Mapping[Node, Parts]) -> set[Node]:
    """Return the nodes before which a view needs unmerged sizes."""
    wanted_nodes: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in parts and any(
            _is_wanted_by(user, node, parts, wanted_nodes) for user in node.users
        ):
            wanted_nodes.add(node)
    return wanted_nodes


def _is_wanted_by(
    user: Node, node: Node, parts: Mapping[Node, Parts], wanted_nodes: Container[Node]
) -> bool:
    if user in wanted_nodes:
        # In a product by rows, the other operands have no merged sizes.
        is_other = user.target in PRODUCTS and user.args[0] is not node
        return not is_other or len(parts[user][-2]) == 1
    if user.target not in VIEWS:
        return False
    before, after = flat_sizes(parts[node]), shape_of(user)
    source_sizes, other, coarse = map(_dynamic, (before, after, shape_of(node)))
    return equal_sizes(before, after) or (source_sizes == other and source_sizes != coarse)


def _is_moved(node: Node) -> bool:
    return all(user.target in MOVES for user in node.users)


def _dynamic(shape: Sizes) -> list[Any]:
    return [expression_of(size) for size in shape if varies(size)]


_INTEGERS = frozenset({"quantized_decomposed", "torchao"})
"""Namespaces of operators that dequantise weights; backends match these calls unchanged."""


def _is_line(node: Node) -> bool:
    """Return whether a convolution is one-dimensional, with several dynamic sizes."""
    args = arguments_of(node)
    shape = shape_of(args["input"])
    if getattr(args["weight"].target, "namespace", "") in _INTEGERS:
        return False
    return len(shape) == 3 and sum(map(varies, shape)) >= SEVERAL


def _lay_out(graph: Graph) -> bool:
    """Choose the layouts of images; return whether one changed.

    Elementwise results have the layout of their operands. Permuting views become copies, so that
    they do not make a result channels-last. A resized image and its source have the layout that
    the kernel reads fastest.
    """
    changed = False
    for node in graph.nodes:
        value = node.meta.get("val")
        if torch.Tag.pointwise not in getattr(node.target, "tags", ()) or value.dim() != _IMAGE:
            continue
        if is_channels_last(value) and not any(map(_lies_last, node.all_input_nodes)):
            node.meta["val"] = new_fake(value, value.shape)
            changed = True
    for resize in filter(_is_left_resize, graph.nodes):
        source: Any = resize.args[0]
        if source.op == "call_function" and len(shape_of(source)) == _IMAGE:
            for node in (source, resize):
                value = node.meta["val"]
                _, channels, height, width = value.shape
                stride = (height * width * channels, 1, width * channels, channels)
                node.meta["val"] = new_fake(value, value.shape, stride)
            changed = True
    return changed


def _lies_last(node: Node) -> bool:
    value = node.meta["val"]
    is_view = node.target in VIEWS or node.target in MOVES
    return not is_view and isinstance(value, torch.Tensor) and is_channels_last(value)


def _is_left_resize(node: Node) -> bool:
    return node.target in _RESIZES and any(map(varies, shape_of(node)[2:]))


_IMAGE = 4
"""Dimensions of a batch of images."""
