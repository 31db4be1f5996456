"""Views that merge dynamic sizes, made as late as they can be.

``flatten(2)`` of images with dynamic batch, height and width is free for a kernel, but backends
whose reshapes carry one dynamic size must leave it. What is computed for each position alone
(a linear layer, a norm over channels, a sum) is the same before such a view, and a view back to
images is then none. A convolution over one dimension is one over two, of lines as images of one
row, between such views.

Images of dynamic sizes that are resized lie channels last, which kernels resize in a sixth of the
time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from lowerdeck.torch_base import (
    arguments_of,
    copy_graph_module,
    expression_of,
    is_channels_last,
    renamed_outputs,
    varies,
    with_parts,
)

_aten = torch.ops.aten
Sizes: TypeAlias = tuple[Any, ...]
Parts: TypeAlias = tuple[Sizes, ...]
"""For each dimension of a tensor, the sizes that it is the product of."""

_VIEWS = frozenset(
    {
        *(_aten.view.default, _aten._unsafe_view.default, _aten.view_copy.default),
        *(_aten.reshape.default, _aten.flatten.using_ints, _aten.unflatten.int),
        *(_aten.squeeze.dim, _aten.squeeze.dims, _aten.unsqueeze.default),
        *(_aten.squeeze_copy.dim, _aten.squeeze_copy.dims, _aten.unsqueeze_copy.default),
    }
)
_LINES: Mapping[Any, Any] = {
    _aten.conv1d.default: _aten.conv2d.default,
    _aten.conv1d.padding: _aten.conv2d.padding,
    _aten.convolution.default: _aten.convolution.default,
}
"""Convolutions over one dimension, and what does the same over two."""
_RESIZES = frozenset({_aten.upsample_bilinear2d.vec, _aten.upsample_nearest2d.vec})
_BINARY = frozenset(
    {
        *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor),
        *(_aten.maximum.default, _aten.minimum.default),
    }
)


def with_late_views(program: ExportedProgram) -> ExportedProgram:
    """Return a program that merges dynamic sizes late, where that spares views.

    Args:
        program: A functional program; not changed, and returned itself if it merges none.
    """
    if not any(_may_change(node) for node in program.graph.nodes):
        return program
    copied = copy_graph_module(program.graph_module)
    if not _Pass(copied.graph).run():
        return program
    copied.recompile()
    signature = renamed_outputs(program.graph_signature, copied.graph)
    return with_parts(program, graph_module=copied, graph_signature=signature)


def _may_change(node: Node) -> bool:
    if node.target in _LINES:
        return _is_line(node)
    return _is_left_resize(node) or (node.target in _VIEWS and _merged(node) is not None)


# -- what passes such a view


def _none(node: Node, parts: Parts) -> dict[str, Any]:
    del node, parts
    return {}


@dataclass(frozen=True, slots=True)
class _Rule:
    """How an operator computes the same of its first argument in parts.

    Attributes:
        parts: Returns the parts of the result, or None where it needs the merged dimensions.
        args: Returns the arguments that speak of other dimensions, by name.
        is_move: Whether it only moves elements.
    """

    parts: Callable[[Node, Parts], Parts | None]
    args: Callable[[Node, Parts], dict[str, Any]] = _none
    is_move: bool = False


def _same(node: Node, parts: Parts) -> Parts | None:
    return parts if node.kwargs.get("memory_format") in _PLAIN else None


_PLAIN = (None, torch.contiguous_format, torch.preserve_format)


def _layer(node: Node, parts: Parts) -> Parts | None:
    return (*parts[:-1], (_shape(node)[-1],)) if len(parts[-1]) == 1 else None


def _layer_norm(node: Node, parts: Parts) -> Parts | None:
    folded: Any = arguments_of(node)["normalized_shape"]
    return parts if all(len(one) == 1 for one in parts[-len(folded) :]) else None


def _channels(node: Node, parts: Parts) -> Parts | None:
    del node
    return parts if len(parts[0]) == len(parts[1]) == 1 else None


def _along(node: Node, parts: Parts) -> Parts | None:
    """Return parts where an operator changes the size of one dimension."""
    axis = _axis(node)
    if len(_shape(node)) != len(parts) or _place(parts[axis]) is None:
        return None
    place, size = _place(parts[axis]), _shape(node)[axis]
    new = tuple(size if at == place else one for at, one in enumerate(parts[axis]))
    return (*parts[:axis], new, *parts[axis + 1 :])


def _along_args(node: Node, parts: Parts) -> dict[str, Any]:
    axis = _axis(node)
    return {"dim": sum(map(len, parts[:axis])) + (_place(parts[axis]) or 0)}


def _axis(node: Node) -> int:
    return int(arguments_of(node).get("dim", -1)) % len(_shape(node))


def _place(sizes: Sizes) -> int | None:
    """Return which of the parts of a dimension is all of it, the others being 1."""
    places = [at for at, size in enumerate(sizes) if not _is_one(size)]
    return (places or [0])[0] if len(places) <= 1 else None


def _turned(node: Node, parts: Parts) -> Parts | None:
    return tuple(parts[axis] for axis in _order(node))


def _turned_args(node: Node, parts: Parts) -> dict[str, Any]:
    numbered = _numbered(parts)
    return {"dims": [dim for axis in _order(node) for dim in numbered[axis]]}


def _order(node: Node) -> list[int]:
    rank = len(_shape(node))
    args: Any = arguments_of(node)
    if "dims" in args:
        return [axis % rank for axis in args["dims"]]
    order = list(range(rank))
    first, second = args["dim0"], args["dim1"]
    order[first], order[second] = order[second], order[first]
    return order


_SAME = _Rule(_same)
_ALONG = _Rule(_along, _along_args)
_TURN = _Rule(_turned, _turned_args, is_move=True)
_RULES: Mapping[Any, _Rule] = {
    **dict.fromkeys(
        [
            *(_aten.relu.default, _aten.gelu.default, _aten.silu.default, _aten.sigmoid.default),
            *(_aten.tanh.default, _aten.neg.default, _aten.abs.default, _aten.exp.default),
            *(_aten.hardswish.default, _aten.hardtanh.default, _aten.leaky_relu.default),
            *(_aten.elu.default, _aten.clamp.default, _aten.pow.Tensor_Scalar),
            *(_aten.clone.default, _aten.contiguous.default, _aten.alias.default),
            *(_aten.dropout.default, _aten.mul.Scalar, _aten.add.Scalar, _aten.div.Scalar),
        ],
        _SAME,
    ),
    **dict.fromkeys([_aten.slice.Tensor, _aten.glu.default], _ALONG),
    **dict.fromkeys(
        [_aten.permute.default, _aten.permute_copy.default, _aten.transpose.int], _TURN
    ),
    **dict.fromkeys([_aten.batch_norm.default, _aten.group_norm.default], _Rule(_channels)),
    _aten.linear.default: _Rule(_layer),
    _aten.layer_norm.default: _Rule(_layer_norm),
}


# -- the pass


@dataclass(frozen=True, slots=True)
class _Fine:
    """A tensor from which another one is a view.

    Attributes:
        node: The tensor.
        parts: For each dimension of the other one, the sizes that it merges.
    """

    node: Node
    parts: Parts


class _Pass:
    """Rewrites one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._held: dict[Node, _Fine] = {}
        self._views: dict[Node, Node] = {}
        self._sizes: dict[Any, Node] = {}
        self._replaced: list[Node] = []

    def run(self) -> bool:
        """Rewrite the graph; return whether anything changed."""
        changed = False
        for node in list(self._graph.nodes):
            if node.target in _LINES and _is_line(node):
                self._widen(node)
                changed = True
        for node in self._graph.nodes:
            if node.target in _ASKING:
                _give_asked_sizes(node)
        parts = _parts_of(self._graph)
        wanted = _wanted(self._graph, parts)
        resizes = [node for node in self._graph.nodes if _is_left_resize(node)]
        if not changed and not wanted:
            return self._lay_as_read() + sum(map(self._lay_channels_last, resizes)) > 0
        for node in list(self._graph.nodes):
            if node.op not in {"call_function", "output"}:
                continue
            if isinstance(node.meta.get("val"), torch.SymInt):
                self._sizes.setdefault(expression_of(node.meta["val"]), node)
            if not self._is_passed(node, parts, wanted):
                for source in node.all_input_nodes:
                    if source in self._held:
                        node.replace_input_with(source, self._merged(source, node))
        self._drop_unread()
        self._lay_as_read()
        for node in resizes:
            self._lay_channels_last(node)
        return True

    def _drop_unread(self) -> None:
        replaced = set(self._replaced)
        for node in reversed(self._graph.nodes):
            is_size = isinstance(node.meta.get("val"), torch.SymInt) and node.op != "placeholder"
            if not node.users and (is_size or node in replaced):
                self._graph.erase_node(node)

    @staticmethod
    def _lay_channels_last(resize: Node) -> bool:
        """Let an image and what it is resized to lie as the kernel reads them fastest."""
        source: Any = resize.args[0]
        if source.op != "call_function" or len(_shape(source)) != _IMAGE:
            return False
        for node in (source, resize):
            value = node.meta["val"]
            node.meta["val"] = value.contiguous(memory_format=torch.channels_last)
        return True

    def _lay_as_read(self) -> int:
        """Let what is computed element by element lie as what it is computed of; count changes.

        Views that permute are copies, so that nothing lies channels last for being one of these.
        """
        count = 0
        for node in self._graph.nodes:
            value = node.meta.get("val")
            if (
                torch.Tag.pointwise not in getattr(node.target, "tags", ())
                or value.dim() != _IMAGE
            ):
                continue
            if is_channels_last(value) and not any(map(_lies_last, node.all_input_nodes)):
                node.meta["val"] = value.new_empty(value.shape)
                count += 1
        return count

    def _widen(self, node: Node) -> None:
        """Make a convolution over one dimension one over two."""
        args = arguments_of(node)
        between, less = _shortened(node)
        last = between[-1]
        with self._graph.inserting_before(node):
            image, weight = (
                self._call(one, _aten.unsqueeze.default, (one, 2), _at(_shape(one), 2, 1))
                for one in (args["input"], args["weight"])
            )
            args |= {"input": image, "weight": weight}
            if less:
                # What a slice drops is not computed.
                padding = int(args["padding"][0])
                sides = (padding, padding - less)
                length = _shape(image)[3] + sum(sides)
                shape = (*_shape(image)[:3], length)
                args["input"] = self._call(
                    image, _aten.constant_pad_nd.default, (image, [*sides, 0, 0]), shape
                )
                args["padding"] = [0]
            for name, other in _SETTINGS.items():
                if isinstance(args.get(name), (list, tuple)):
                    args[name] = [other, *args[name]]
            target = _LINES[node.target]
            made = self._call(node, target, tuple(args.values()), _at(_shape(last), 2, 1))
            line = self._call(node, _aten.squeeze.dim, (made, 2), _shape(last))
        last.replace_all_uses_with(line)
        for each in reversed(between):
            self._graph.erase_node(each)

    def _is_passed(
        self, node: Node, parts: Mapping[Node, Parts], wanted: Mapping[Node, bool]
    ) -> bool:
        """Hold a node's result in parts, or replace a view; return whether that was done."""
        if node.target in _VIEWS:
            return self._is_view_passed(node, wanted)
        if node not in parts:
            return False
        operands = [one for one in node.all_input_nodes if one in self._held]
        rule = _RULES.get(node.target)
        is_due = bool(wanted.get(node)) or (rule is not None and rule.is_move)
        if not operands or not (is_due or len(operands) > 1):
            return False
        fine = next((self._held[one] for one in operands if rule or _is_like(one, node)), None)
        if fine is None:
            return False
        args = arguments_of(node)
        first = next(iter(args))
        if rule is not None:
            result = rule.parts(node, fine.parts)
            if args[first] not in self._held or result is None:
                return False
            args |= {first: fine.node, **rule.args(node, fine.parts)}
        else:
            result = fine.parts
            for name in list(args)[:2]:
                if isinstance(args[name], Node):
                    args[name] = self._aligned(args[name], node, fine)
        target = node.target
        if rule is _TURN:
            target, args = _aten.permute.default, {first: args[first], "dims": args["dims"]}
        kwargs = {name: one for name, one in args.items() if name in node.kwargs}
        count = len(node.args)
        if rule is not None and rule.args is not _none:
            count = max(count, 1 + list(args).index("dims" if rule is _TURN else "dim"))
        values = tuple(args.values())[:count]
        with self._graph.inserting_before(node):
            shape = tuple(size for each in result for size in each)
            made = self._call(node, target, values, shape, kwargs)
        self._held[node] = _Fine(made, result)
        self._replaced.append(node)
        return True

    def _is_view_passed(self, node: Node, wanted: Mapping[Node, bool]) -> bool:
        source: Any = node.args[0]
        if source in self._held:
            source = self._held[source].node
            if _equal(_shape(source), _shape(node)):
                node.replace_all_uses_with(source)
                self._replaced.append(node)
                return True
            merged = _merged_sizes(_shape(source), _shape(node))
            if merged is None or not (wanted.get(node) or _is_moved(node)):
                with self._graph.inserting_before(node):
                    made = self._view(node, source, _shape(node), source)
                node.replace_all_uses_with(made)
                self._replaced.append(node)
                return True
        else:
            merged = _merged(node)
        if merged is None or not (wanted.get(node) or _is_moved(node)):
            return False
        self._held[node] = _Fine(source, merged)
        self._replaced.append(node)
        return True

    def _aligned(self, operand: Node, node: Node, fine: _Fine) -> Node:
        """Return an operand of a broadcast with the dimensions that a result has in parts."""
        held = self._held.get(operand)
        if held is not None and _equal(_shape(held.node), _shape(fine.node)):
            return held.node
        if _is_like(operand, node):
            source = operand if held is None else self._merged(operand, node)
            with self._graph.inserting_before(node):
                return self._view(operand, source, _shape(fine.node), fine.node)
        missing = len(fine.parts) - len(_shape(operand))
        for axis in reversed(range(missing, len(fine.parts))):
            for _ in fine.parts[axis][1:]:
                at = axis - missing
                with self._graph.inserting_before(node):
                    shape = _at(_shape(operand), at, 1)
                    operand = self._call(operand, _aten.unsqueeze.default, (operand, at), shape)
        return operand

    def _merged(self, held: Node, before: Node) -> Node:
        """Return the view of what is held in parts."""
        if held not in self._views:
            fine = self._held[held]
            ones = _spare_ones(fine.parts)
            with self._graph.inserting_before(before):
                if ones:
                    args = (fine.node, ones)
                    made = self._call(held, _aten.squeeze.dims, args, _shape(held))
                else:
                    made = self._view(held, fine.node, _shape(held), fine.node)
                self._views[held] = made
        return self._views[held]

    def _view(self, like: Node, source: Any, shape: Sizes, sized: Node) -> Node:
        """Return a view; its sizes are found among the program's, or those of a tensor."""
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
        if source.target in _VIEWS:
            source = source.args[0]
        return self._call(like, _aten.view.default, (source, sizes), shape)

    def _product(self, expression: Any, sized: Node) -> Any:
        """Return the node of a size that is one of a tensor's, or the product of some in turn."""
        shape = [expression_of(size) for size in _shape(sized)]
        for first in range(len(shape)):
            total: Any = 1
            for last in range(first, len(shape)):
                total = total * shape[last]
                if _is_equal(total, expression):
                    return self._product_of(sized, range(first, last + 1))
        raise AssertionError(f"{expression} is no product of {shape}")

    def _product_of(self, sized: Node, dims: Sequence[int]) -> Any:
        found: Any = None
        for dim in dims:
            size = _shape(sized)[dim]
            if _is_one(size):
                continue
            one: Any = size
            if varies(size):
                one = self._graph.call_function(_aten.sym_size.int, (sized, dim))
                one.meta = {"val": size}
                self._sizes.setdefault(expression_of(size), one)
            if found is None:
                found = one
            else:
                value = (found.meta["val"] if isinstance(found, Node) else found) * size
                found = self._graph.call_function(operator.mul, (found, one))
                found.meta = {"val": value}
        return found

    def _call(
        self,
        like: Node,
        target: Any,
        args: tuple[Any, ...],
        shape: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> Node:
        """Add a call whose result is like another one but for its sizes."""
        made = self._graph.call_function(target, args, dict(kwargs or {}))
        made.meta = {**like.meta, "val": like.meta["val"].new_empty(tuple(shape))}
        return made


_SETTINGS = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}


_ASKING = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)


def _give_asked_sizes(view: Node) -> None:
    """Give a view the sizes that it asks for, for the quotients that torch took them for."""
    asked: Any = view.args[1]
    shape = _shape(view)
    sizes = [size.meta["val"] if isinstance(size, Node) else size for size in asked]
    sizes = [
        was if type(size) is int and size == -1 else size
        for size, was in zip(sizes, shape, strict=True)
    ]
    if any(expression_of(a) != expression_of(b) for a, b in zip(sizes, shape, strict=True)):
        view.meta["val"] = view.meta["val"].new_empty(sizes)


def _shortened(node: Node) -> tuple[list[Node], int]:
    """Return a convolution up to a slice that drops some of its padded end, and how many; or 0.

    Speech encoders (wav2vec 2.0) do so after kernels of even size.
    """
    args = arguments_of(node)
    found = [node]
    while len(found[-1].users) == 1:
        found += found[-1].users
        if found[-1].target is not _aten.slice.Tensor or not _is_like(found[-1], node):
            break
    padding, stride = args["padding"], args["stride"]
    if isinstance(padding, str) or list(stride) != [1] or args.get("transposed"):
        return [node], 0
    if found[-1].target is _aten.slice.Tensor:
        part: Any = arguments_of(found[-1])
        is_plain = (part["dim"] % 3, part["start"] or 0, part["step"]) == (2, 0, 1)
        less = -part["end"] if is_plain and isinstance(part["end"], int) else 0
        if 0 < less <= padding[0]:
            return found, less
    return [node], 0


def _parts_of(graph: Graph) -> dict[Node, Parts]:
    """Return in which parts the results of nodes could be held."""
    found: dict[Node, Parts] = {}
    for node in graph.nodes:
        parts = None
        if node.target in _VIEWS:
            source = node.args[0]
            before = _flat(found[source]) if source in found else _shape(source)
            parts = _merged_sizes(before, _shape(node))
            if parts is not None and sum(map(varies, _flat(parts))) < _SEVERAL:
                parts = None
        elif node.target in _BINARY:
            operands = [one for one in node.all_input_nodes if one in found]
            parts = next((found[one] for one in operands if _is_like(one, node)), None)
            if parts is not None and not _can_align(node, parts):
                parts = None
        elif node.target in _RULES and node.args[0] in found:
            parts = _RULES[node.target].parts(node, found[node.args[0]])
        if parts is not None:
            found[node] = parts
    return found


_SEVERAL = 2
"""From how many dynamic sizes on a view is spared."""


def _can_align(node: Node, parts: Parts) -> bool:
    """Return whether the operands of a broadcast are like the result, or 1 where it has parts."""
    for operand in node.all_input_nodes:
        if not isinstance(operand.meta["val"], torch.Tensor):
            return False
        shape = _shape(operand)
        missing = len(parts) - len(shape)
        whole = all(
            len(parts[missing + axis]) == 1 or _is_one(size) for axis, size in enumerate(shape)
        )
        if not whole and not _is_like(operand, node):
            return False
    return True


def _wanted(graph: Graph, parts: Mapping[Node, Parts]) -> dict[Node, bool]:
    """Return the nodes behind which a view needs the sizes that they would merge."""
    found: dict[Node, bool] = {}
    for node in reversed(graph.nodes):
        if node in parts and any(_is_wanted_by(user, node, parts, found) for user in node.users):
            found[node] = True
    return found


def _is_wanted_by(
    user: Node, node: Node, parts: Mapping[Node, Parts], wanted: Mapping[Node, bool]
) -> bool:
    if user.target in _VIEWS:
        before, after = _flat(parts[node]), _shape(user)
        if _equal(before, after):
            return True
        one, other, coarse = map(_dynamic, (before, after, _shape(node)))
        return (one == other and one != coarse) or bool(wanted.get(user))
    return user in parts and bool(wanted.get(user))


def _is_moved(node: Node) -> bool:
    return all(user.target in _RULES and _RULES[user.target].is_move for user in node.users)


def _dynamic(shape: Sizes) -> list[Any]:
    return [expression_of(size) for size in shape if varies(size)]


_INTEGERS = frozenset({"quantized_decomposed", "torchao"})
"""Where operators are from that make weights of integers, which backends look for as they are."""


def _is_line(node: Node) -> bool:
    """Return whether a convolution is over one dimension, of several dynamic sizes."""
    args = arguments_of(node)
    shape = _shape(args["input"])
    if getattr(args["weight"].target, "namespace", "") in _INTEGERS:
        return False
    return len(shape) == 3 and sum(map(varies, shape)) >= _SEVERAL


def _lies_last(node: Node) -> bool:
    value = node.meta["val"]
    rule = _RULES.get(node.target)
    is_view = node.target in _VIEWS or (rule is not None and rule.is_move)
    return not is_view and isinstance(value, torch.Tensor) and is_channels_last(value)


def _is_left_resize(node: Node) -> bool:
    return node.target in _RESIZES and any(map(varies, _shape(node)[2:]))


_IMAGE = 4
"""Dimensions of a batch of images."""


def _merged(view: Node) -> Parts | None:
    """Return which sizes a view merges, if some are dynamic and it does nothing else."""
    source: Any = view.args[0]
    before, after = _shape(source), _shape(view)
    if sum(map(varies, before)) < _SEVERAL:
        return None
    return _merged_sizes(before, after)


def _merged_sizes(before: Sizes, after: Sizes) -> Parts | None:
    """Return for each size which ones it is the product of; None if it is no such view."""
    found: list[Sizes] = []
    at = 0
    for size in after:
        start, total = at, 1
        while at < len(before) and (at == start or not _is_equal(total, expression_of(size))):
            total = total * expression_of(before[at])
            at += 1
        if at == start or not _is_equal(total, expression_of(size)):
            return None
        found.append(tuple(before[start:at]))
    if not found or not all(map(_is_one, before[at:])):
        return None
    found[-1] = (*found[-1], *before[at:])
    return tuple(found) if len(before) > len(after) else None


def _flat(parts: Parts) -> Sizes:
    return tuple(size for each in parts for size in each)


def _spare_ones(parts: Parts) -> list[int]:
    """Return which sizes are 1 and merged into others, if nothing else is merged."""
    found: list[int] = []
    for each, numbers in zip(parts, _numbered(parts), strict=True):
        place = _place(each)
        if place is None:
            return []
        found += [number for at, number in enumerate(numbers) if at != place]
    return found


def _numbered(parts: Parts) -> list[list[int]]:
    numbers = iter(range(sum(map(len, parts))))
    return [[next(numbers) for _ in each] for each in parts]


def _shape(node: Any) -> Sizes:
    return tuple(node.meta["val"].shape)


def _at(shape: Sizes, axis: int, size: int) -> Sizes:
    return (*shape[:axis], size, *shape[axis:])


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _is_like(one: Node, other: Node) -> bool:
    return _equal(_shape(one), _shape(other))


def _equal(one: Sizes, other: Sizes) -> bool:
    return len(one) == len(other) and all(
        _is_equal(expression_of(a), expression_of(b)) for a, b in zip(one, other, strict=True)
    )


def _is_equal(one: Any, other: Any) -> bool:
    if one is other or one == other:
        return True
    if isinstance(one, int) and isinstance(other, int):
        return False
    return _symbols(one) == _symbols(other) and bool((one - other).expand() == 0)


def _symbols(expression: Any) -> Any:
    return getattr(expression, "free_symbols", set())
