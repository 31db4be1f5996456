"""Move views that merge dynamic sizes as late as possible.

``flatten(2)`` of images with dynamic batch, height and width costs a kernel nothing, but backends
whose reshapes infer only one dynamic size cannot delegate it. Operators that do not mix positions
(a linear layer, a norm over channels, a sum) commute with such a view, which then cancels with the
view back to images. ``view_rules`` lists these operators, and ``view_factors`` defines the terms.

Two other changes for dynamic sizes: 1-D convolutions become 2-D ones on images of one row, and
resized images become channels-last, which kernels resize faster.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

from lowerdeck.lowered_module.program.masks import decompose_attention
from lowerdeck.lowered_module.program.plain_sizes import number_of
from lowerdeck.lowered_module.program.view_factors import (
    SEVERAL,
    Factors,
    Sizes,
    drop_ones,
    dynamic_factors_of,
    equal_sizes,
    factor_view,
    flat_sizes,
    is_equal,
    is_like,
    is_one,
    removable_ones,
    shape_of,
    unmerged_factors,
    with_size_at,
)
from lowerdeck.lowered_module.program.view_rules import (
    ATTENTION,
    BROADCASTS,
    MOVES,
    PRODUCTS,
    RULES,
    VIEWS,
    broadcast_factors,
    find_factors,
    product_factors,
)
from lowerdeck.torch_base import arguments_of, expression_of, is_channels_last, new_fake, varies

_aten = torch.ops.aten
_RESHAPES = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_CONV2D_OF: Mapping[Any, Any] = {
    _aten.conv1d.default: _aten.conv2d.default,
    _aten.conv1d.padding: _aten.conv2d.padding,
    _aten.convolution.default: _aten.convolution.default,
}
"""2-D operator by 1-D operator."""
_RESIZES = frozenset({_aten.upsample_bilinear2d.vec, _aten.upsample_nearest2d.vec})


def merge_late(graph: Graph) -> bool:
    """Merge dynamic sizes late, in place, if that removes views; return whether it changed any."""
    return any(map(_may_change, graph.nodes)) and _Pass(graph).run()


def _may_change(node: Node) -> bool:
    is_merge = node.target in VIEWS and dynamic_factors_of(node) is not None
    return is_merge or _is_dynamic_conv1d(node) or _is_dynamic_resize(node)


class _Unmerged(NamedTuple):
    """The unmerged form of a result.

    Attributes:
        node: The call on unmerged inputs.
        factors: The factors of the original, merged result.
    """

    node: Node
    factors: Factors


class _Pass:
    """Rewriter of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._unmerged: dict[Node, _Unmerged] = {}
        self._views: dict[Node, Node] = {}
        self._sizes: dict[Any, Node] = {}
        self._values: dict[Any, torch.Tensor] = {}
        self._replaced: set[Node] = set()

    def run(self) -> bool:
        """Rewrite the graph; return whether anything changed."""
        convolutions = list(filter(_is_dynamic_conv1d, self._graph.nodes))
        for node in convolutions:
            self._make_conv2d(node)
        for node in self._graph.nodes:
            if node.target in _RESHAPES:
                _use_requested_sizes(node)
        moved = [self._move_before_split(node) for node in list(self._graph.nodes)]
        factors = find_factors(self._graph)
        needed = _find_needed(self._graph, factors)
        attentions = [node for node in needed if node.target is ATTENTION]
        if attentions:
            for node in attentions:
                decompose_attention(node, None, {})
                self._graph.erase_node(node)
            factors = find_factors(self._graph)
            needed = _find_needed(self._graph, factors)
        if convolutions or any(moved) or needed:
            self._rewrite_all(factors, needed)
        return bool(convolutions or any(moved) or needed) | _choose_image_layouts(self._graph)

    def _move_before_split(self, node: Node) -> bool:
        """Move a broadcast before a view whose effect a later view undoes; return True if moved.

        Swin splits the batch into images and windows, adds a mask for each window, and merges both
        again. The rewritten program repeats the mask for each image instead.
        """
        view = next((x for x in node.all_input_nodes if x.target in _RESHAPES), None)
        if view is None or not _is_undone_after(node, view, view):
            return False
        source: Any = view.args[0]
        factors = factor_view(shape_of(view), shape_of(source))
        if factors is None or len(_dynamic(flat_sizes(factors))) < SEVERAL:
            return False
        if not equal_sizes(flat_sizes(factors), shape_of(view)):
            # Static sizes are split or merged as well.
            return False
        with self._graph.inserting_before(node):
            operands = [
                source if x is view else self._merge_operand(x, view, factors) for x in node.args
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

    def _merge_operand(self, operand: Any, view: Node, factors: Factors) -> Any:
        """Return a broadcast's operand in a form that broadcasts with a view's base, or None."""
        if not _is_tensor(operand):
            return operand
        requested: Any = view.args[1]
        before = (1,) * (len(requested) - len(shape_of(operand))) + shape_of(operand)
        wide: list[Any] = []
        shape: list[Any] = []
        for factor, size in zip(factors, shape_of(view.args[0]), strict=True):
            is_unit = all(map(is_one, before[len(wide) : len(wide) + len(factor)]))
            wide += [1] * len(factor) if is_unit else factor
            shape.append(1 if is_unit else size)
        sizes = [
            new if is_one(new) else -1 if equal_sizes([old], [new]) else requested[at]
            for at, (old, new) in enumerate(zip(before, wide, strict=True))
        ]
        # ``expand`` can infer only sizes that the operand has.
        is_known = all(a != -1 or not is_one(b) for a, b in zip(sizes, before, strict=True))
        if sum(map(varies, shape)) > 1 or not is_known:
            return None
        repeated = self._call(operand, _aten.expand_copy.default, (operand, sizes), wide)
        merged = [-1 if varies(size) else int(size) for size in shape]
        return self._call(operand, _aten.view.default, (repeated, merged), shape)

    def _rewrite_all(self, factors: Mapping[Node, Factors], needed: Container[Node]) -> None:
        """Rewrite all nodes in order, and merge inputs where a node needs merged ones."""
        for node in list(self._graph.nodes):
            if node.op not in {"call_function", "output"}:
                continue
            if isinstance(node.meta.get("val"), torch.SymInt):
                self._sizes.setdefault(expression_of(node.meta["val"]), node)
            with self._graph.inserting_before(node):
                if not self._rewrite_node(node, factors, needed):
                    for source in node.all_input_nodes:
                        if source in self._unmerged:
                            node.replace_input_with(source, self._merge(source))
        for node in reversed(self._graph.nodes):
            is_size = isinstance(node.meta.get("val"), torch.SymInt) and node.op != "placeholder"
            if not node.users and (is_size or node in self._replaced):
                self._graph.erase_node(node)

    def _make_conv2d(self, node: Node) -> None:
        """Replace a 1-D convolution by a 2-D one, including a slice that drops some of its end."""
        args = arguments_of(node)
        chain, dropped = _trailing_slice(node)
        last = chain[-1]
        with self._graph.inserting_before(node):
            image, weight = (
                self._call(x, _aten.unsqueeze.default, (x, 2), with_size_at(shape_of(x), 2, 1))
                for x in (args["input"], args["weight"])
            )
            args |= {"input": image, "weight": weight}
            if dropped:
                # Do not compute the elements that the slice drops.
                padding = int(args["padding"][0])
                sides = (padding, padding - dropped)
                length = shape_of(image)[3] + sum(sides)
                shape = (*shape_of(image)[:3], length)
                args["input"] = self._call(
                    image, _aten.constant_pad_nd.default, (image, [*sides, 0, 0]), shape
                )
                args["padding"] = [0]
            for name, other in _SETTINGS.items():
                if isinstance(args.get(name), (list, tuple)):
                    args[name] = [other, *args[name]]
            target = _CONV2D_OF[node.target]
            convolved = self._call(
                node, target, tuple(args.values()), with_size_at(shape_of(last), 2, 1)
            )
            line = self._call(node, _aten.squeeze.dim, (convolved, 2), shape_of(last))
        last.replace_all_uses_with(line)
        for replaced in reversed(chain):
            self._graph.erase_node(replaced)

    def _rewrite_node(
        self, node: Node, factors: Mapping[Node, Factors], needed: Container[Node]
    ) -> bool:
        """Add the unmerged form of a result, or replace a view; return whether it did."""
        if node.target in VIEWS:
            return self._rewrite_view(node, needed)
        sources = {x: self._unmerged[x] for x in node.all_input_nodes if x in self._unmerged}
        should_move = node in needed or node.target in MOVES or len(sources) > 1
        if node not in factors or not (sources and should_move):
            return False
        if node.target in PRODUCTS:
            return node in needed and self._rewrite_product(node)
        args = arguments_of(node)
        if node.target in BROADCASTS:
            result = broadcast_factors(node, {x: u.factors for x, u in sources.items()})
            if result is None:
                return False
            target, changed = node.target, dict[str, Any]()
            nodes = [unmerged.node for unmerged in sources.values()]
            sized = next(n for n in nodes if equal_sizes(shape_of(n), flat_sizes(result)))
            for name in list(args)[:2]:
                if isinstance(args[name], Node):
                    args[name] = self._align_operand(args[name], node, result, sized)
        else:
            first = sources.get(cast("Node", node.args[0]))
            call = None if first is None else RULES[node.target](node, first.factors)
            if first is None or call is None:
                return False
            target, changed, result = call
            tensor = {next(iter(args)): first.node}
            args = {**(args if target is node.target else {}), **tensor, **changed}
        kwargs = {name: argument for name, argument in args.items() if name in node.kwargs}
        count = max([len(node.args), *(1 + list(args).index(name) for name in changed)])
        values = tuple(args.values())[:count]
        call_node = self._call(node, target, values, flat_sizes(result), kwargs)
        self._unmerged[node] = _Unmerged(call_node, result)
        self._replaced.add(node)
        return True

    def _rewrite_product(self, node: Node) -> bool:
        first, other = cast("tuple[Node, Node]", node.args)
        for operand in filter(self._unmerged.__contains__, (first, other)):
            self._squeeze_ones(operand)
        unmerged = {x: self._unmerged[x].factors for x in (first, other) if x in self._unmerged}
        factors = product_factors(node, unmerged)
        if factors is None:
            return False
        at = len(factors) - 2
        if len(factors[at]) == 1:
            other = self._unmerged[other].node
        elif other in unmerged:
            other = self._merge(other)
        for _ in factors[at][1:]:
            shape = with_size_at(shape_of(other), at, 1)
            other = self._call(other, _aten.unsqueeze.default, (other, at), shape)
        args = self._unmerged[first].node, other
        product = self._call(node, _aten.matmul.default, args, flat_sizes(factors))
        self._unmerged[node] = _Unmerged(product, factors)
        self._replaced.add(node)
        return True

    def _squeeze_ones(self, node: Node) -> None:
        """Remove factors of 1, which ``einsum`` leaves, from an unmerged tensor."""
        unmerged = self._unmerged[node]
        ones = removable_ones(unmerged.factors)
        if ones:
            factors = drop_ones(unmerged.factors)
            args = (unmerged.node, ones)
            squeezed = self._call(node, _aten.squeeze.dims, args, flat_sizes(factors))
            self._unmerged[node] = _Unmerged(squeezed, factors)

    def _rewrite_view(self, node: Node, needed: Container[Node]) -> bool:
        source: Any = node.args[0]
        unmerged = self._unmerged.get(source)
        if unmerged is not None:
            source = unmerged.node
            merged = factor_view(shape_of(source), shape_of(node))
        else:
            merged = dynamic_factors_of(node)
        if merged is not None and (node in needed or _feeds_permutations_only(node)):
            flat = flat_sizes(merged)
            if not equal_sizes(shape_of(source), flat):
                source = self._view(node, source, flat, source)
            self._unmerged[node] = _Unmerged(source, merged)
        elif unmerged is None:
            return False
        else:
            if not equal_sizes(shape_of(source), shape_of(node)):
                source = self._view(node, source, shape_of(node), source)
            node.replace_all_uses_with(source)
        self._replaced.add(node)
        return True

    def _align_operand(self, operand: Node, node: Node, factors: Factors, sized: Node) -> Node:
        """Return an operand that broadcasts with the unmerged result, by a view or sizes of 1."""
        unmerged = self._unmerged.get(operand, _Unmerged(operand, unmerged_factors(operand)))
        source, flat = unmerged.node, flat_sizes(factors)
        if is_like(operand, node):
            same = equal_sizes(shape_of(source), flat)
            return source if same else self._view(operand, source, flat, sized)
        missing = len(factors) - len(unmerged.factors)
        for axis in reversed(range(len(unmerged.factors))):
            at = len(flat_sizes(unmerged.factors[:axis]))
            for _ in range(len(factors[missing + axis]) - len(unmerged.factors[axis])):
                shape = with_size_at(shape_of(source), at, 1)
                source = self._call(source, _aten.unsqueeze.default, (source, at), shape)
        return source

    def _merge(self, node: Node) -> Node:
        """Return the merged form of an unmerged result, added once."""
        if node not in self._views:
            unmerged = self._unmerged[node]
            ones = removable_ones(unmerged.factors)
            if ones and len(shape_of(unmerged.node)) == len(ones) + len(unmerged.factors):
                args = (unmerged.node, ones)
                view = self._call(node, _aten.squeeze.dims, args, shape_of(node))
            else:
                view = self._view(node, unmerged.node, shape_of(node), unmerged.node)
            self._views[node] = view
        return self._views[node]

    def _view(self, like: Node, source: Any, shape: Sizes, sized: Node) -> Node:
        """Add a view; dynamic sizes are nodes of the program, inferred, or read from ``sized``."""
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
        """Return a node with the product of consecutive sizes of a tensor."""
        shape = [expression_of(size) for size in shape_of(sized)]
        for first, last in combinations(range(len(shape) + 1), 2):
            if is_equal(math.prod(shape[first:last]), expression):
                return self._product_of(sized, range(first, last))
        raise AssertionError(f"{expression} is not a product of {shape}")

    def _product_of(self, sized: Node, dims: Sequence[int]) -> Any:
        total: Any = None
        for dim in dims:
            size = unit = shape_of(sized)[dim]
            if is_one(size):
                continue
            if varies(size):
                unit = self._graph.call_function(_aten.sym_size.int, (sized, dim))
                unit.meta = {"val": size}
                self._sizes.setdefault(expression_of(size), unit)
            if total is not None:
                product = self._graph.call_function(operator.mul, (total, unit))
                product.meta = {"val": number_of(total) * size}
                unit = product
            total = unit
        return total

    def _call(
        self,
        like: Node,
        target: Any,
        args: tuple[Any, ...],
        shape: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> Node:
        """Add a call with the metadata of ``like``, except for the sizes of its result."""
        call = self._graph.call_function(target, args, dict(kwargs or {}))
        before = like.meta["val"]
        key = (before.dtype, *map(expression_of, shape))
        if key not in self._values:
            self._values[key] = new_fake(before, shape)
        call.meta = {**like.meta, "val": self._values[key]}
        return call


_SETTINGS = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
"""Settings of a convolution along a height of 1."""


def _use_requested_sizes(view: Node) -> None:
    """Give a view's fake result the requested sizes, which torch records as quotients."""
    requested: Any = view.args[1]
    shape = shape_of(view)
    sizes = [
        was if type(size) is int and size == -1 else number_of(size)
        for size, was in zip(requested, shape, strict=True)
    ]
    if list(map(expression_of, sizes)) != list(map(expression_of, shape)):
        view.meta["val"] = new_fake(view.meta["val"], sizes)


def _trailing_slice(node: Node) -> tuple[list[Node], int]:
    """Return a convolution with the slices after it, and the number of elements they drop.

    Speech encoders (wav2vec 2.0) drop the last element after kernels of even size.
    """
    args = arguments_of(node)
    chain = [node]
    while len(chain[-1].users) == 1:
        chain += chain[-1].users
        if chain[-1].target is not _aten.slice.Tensor or not is_like(chain[-1], node):
            break
    padding, stride = args["padding"], args["stride"]
    if isinstance(padding, str) or list(stride) != [1] or args.get("transposed"):
        return [node], 0
    if chain[-1].target is _aten.slice.Tensor:
        bounds: Any = arguments_of(chain[-1])
        is_plain = (bounds["dim"] % 3, bounds["start"] or 0, bounds["step"]) == (2, 0, 1)
        dropped = -bounds["end"] if is_plain and isinstance(bounds["end"], int) else 0
        if 0 < dropped <= padding[0]:
            return chain, dropped
    return [node], 0


def _is_undone_after(node: Node, operand: Node, view: Node) -> bool:
    """Return whether all users of a broadcast undo a view of its only full-size operand.

    Further broadcasts may precede the views that undo it.
    """
    if node.target not in BROADCASTS:
        return False
    source: Any = view.args[0]
    alike = [x for x in node.all_input_nodes if _is_tensor(x) and is_like(x, node)]
    return alike == [operand] and all(
        is_like(user, source) if user.target in VIEWS else _is_undone_after(user, node, view)
        for user in node.users
    )


def _is_tensor(operand: Any) -> bool:
    return isinstance(operand, Node) and isinstance(operand.meta["val"], torch.Tensor)


def _find_needed(graph: Graph, factors: Mapping[Node, Factors]) -> set[Node]:
    """Return the nodes whose unmerged form makes a later view unnecessary."""
    needed: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in factors and any(
            _needs_unmerged(user, node, factors, needed) for user in node.users
        ):
            needed.add(node)
    return needed


def _needs_unmerged(
    user: Node, node: Node, factors: Mapping[Node, Factors], needed: Container[Node]
) -> bool:
    if user in needed:
        # If the rows of a product are merged, its other operands have no unmerged form.
        is_other = user.target in PRODUCTS and user.args[0] is not node
        return not is_other or len(factors[user][-2]) == 1
    if user.target not in VIEWS:
        return False
    before, after = flat_sizes(factors[node]), shape_of(user)
    source_sizes, other, merged = map(_dynamic, (before, after, shape_of(node)))
    return equal_sizes(before, after) or (source_sizes == other and source_sizes != merged)


def _feeds_permutations_only(node: Node) -> bool:
    return all(user.target in MOVES for user in node.users)


def _dynamic(shape: Sizes) -> list[Any]:
    return [expression_of(size) for size in shape if varies(size)]


_DEQUANTIZING = frozenset({"quantized_decomposed", "torchao"})
"""Namespaces of operators that dequantise weights; backends match these calls unchanged."""


def _is_dynamic_conv1d(node: Node) -> bool:
    """Return whether a convolution is 1-D with several dynamic sizes and a float weight."""
    if node.target not in _CONV2D_OF:
        return False
    args = arguments_of(node)
    shape = shape_of(args["input"])
    is_float = getattr(args["weight"].target, "namespace", "") not in _DEQUANTIZING
    return is_float and len(shape) == 3 and sum(map(varies, shape)) >= SEVERAL


def _choose_image_layouts(graph: Graph) -> bool:
    """Choose the layouts of images; return whether one changed.

    Elementwise results have the layout of their operands. Permuting views become copies, so that
    they do not make a result channels-last. A resized image and its source become channels-last.
    """
    changed = False
    for node in graph.nodes:
        value = node.meta.get("val")
        if torch.Tag.pointwise not in getattr(node.target, "tags", ()) or value.dim() != _IMAGE:
            continue
        if is_channels_last(value) and not any(map(_is_channels_last_value, node.all_input_nodes)):
            node.meta["val"] = new_fake(value, value.shape)
            changed = True
    for resize in filter(_is_dynamic_resize, graph.nodes):
        source: Any = resize.args[0]
        if source.op == "call_function" and len(shape_of(source)) == _IMAGE:
            for node in (source, resize):
                value = node.meta["val"]
                _, channels, height, width = value.shape
                stride = (height * width * channels, 1, width * channels, channels)
                node.meta["val"] = new_fake(value, value.shape, stride)
            changed = True
    return changed


def _is_channels_last_value(node: Node) -> bool:
    value = node.meta["val"]
    is_view = node.target in VIEWS or node.target in MOVES
    return not is_view and isinstance(value, torch.Tensor) and is_channels_last(value)


def _is_dynamic_resize(node: Node) -> bool:
    return node.target in _RESIZES and any(map(varies, shape_of(node)[2:]))


_IMAGE = 4
"""Dimensions of a batch of images."""
