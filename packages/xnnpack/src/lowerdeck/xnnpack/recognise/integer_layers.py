"""Linear layers of 8-bit integers as torchao's ``Int8Tensor`` writes them: products with no name.

Rows are rounded, multiplied by ``_int_mm`` and scaled in about twenty calls; or floats are
multiplied with integers that became floats, and scaled. Either is a linear layer of a weight that
is dequantised.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import fake, is_one, named, shape_of
from lowerdeck.xnnpack.operators.contract import ASSERTION
from lowerdeck.xnnpack.operators.quantization import chosen_by, is_constant_source, name_of
from lowerdeck.xnnpack.recognise.matching import same_sizes

_aten = torch.ops.aten
_SAME = frozenset(
    named(
        "view reshape _unsafe_view flatten.using_ints to.dtype _to_copy clone contiguous "
        "alias detach"
    )
)
"""What leaves numbers in their order, and those of integers as they are."""
_TURNS = frozenset(named("t permute transpose.int"))
_ROUNDED = "torchao.quantize_affine.default"
_CHOSEN = "torchao.choose_qparams_affine.default"
_INT8 = (-128, 127)
_SEVEN_BITS = (-64, 63)
PRODUCTS = frozenset(named("_int_mm mm"))
"""Where such a layer is looked for."""


@dataclass(slots=True)
class IntegerLayer:
    """A linear layer in its pieces.

    Attributes:
        rows: What it multiplies: floats, or integers that were quantised at run time.
        weight: The integers of its weight.
        scale: How far apart those are, a number or one for each output.
        last: The piece whose result is the layer's.
        bias: What is added, a constant.
        pieces: All calls that it stands for, ``last`` too, in no order.
    """

    rows: Node
    weight: Node
    scale: Node
    last: Node
    bias: Node | None = None
    pieces: dict[Node, None] = field(default_factory=dict)

    @property
    def is_rounded(self) -> bool:
        """Whether its rows are quantised at run time."""
        return name_of(self.rows) == _ROUNDED

    def insert(self, graph: Graph) -> tuple[Node, ...]:
        """Add the layer before its last piece, and return its calls, itself last."""
        ops, rows, made = torch.ops.torchao, self.rows, []
        given = rows.args[0] if self.is_rounded else rows
        value = fake(given)  # type: ignore[arg-type]  # a node, as who finds layers has seen
        weight = fake(self.weight)
        assert value is not None
        assert weight is not None
        with graph.inserting_before(self.last):
            if self.is_rounded:
                args = arguments_of(rows)
                rows = graph.call_function(
                    ops.dequantize_affine.default,
                    (
                        *(rows, args["block_size"], args["scale"], args["zero_point"]),
                        *(torch.int8, *_INT8, value.dtype),
                    ),
                )
                rows.meta["val"] = value
                made.append(rows)
            whole = is_one(fake(self.scale).numel())  # type: ignore[union-attr]  # a constant
            block = [weight.shape[0] if whole else 1, weight.shape[1]]
            real = graph.call_function(
                ops.dequantize_affine.default,
                (self.weight, block, self.scale, None, torch.int8, *_INT8, value.dtype),
            )
            real.meta["val"] = weight.new_empty(weight.shape, dtype=value.dtype, device="meta")
            layer = graph.call_function(_aten.linear.default, (rows, real, self.bias))
            layer.meta = dict(self.last.meta)
        made += [real, layer]
        for one, ending in zip(made, ("rows", "weight")[-len(made) + 1 :], strict=False):
            one.name = f"{self.last.name}_{ending}"
        return tuple(made)


def integer_layers(graph: Graph, constants: Collection[str]) -> list[IntegerLayer]:
    """Return the layers of 8-bit integers in a graph.

    Args:
        constants: Names of the placeholders that no run changes.
    """
    found = [
        layer
        for node in graph.nodes
        if node.target in PRODUCTS and (layer := _Search(node, constants).layer()) is not None
    ]
    # What rounds rows is a part of layers alone, or none of any.
    while True:
        inside = {piece for layer in found for piece in layer.pieces}
        kept = [layer for layer in found if not layer.is_rounded or _rounds_alone(layer, inside)]
        if len(kept) == len(found):
            return found
        found = kept


def _rounds_alone(layer: IntegerLayer, inside: Collection[Node]) -> bool:
    choice = chosen_by(layer.rows.args[2])  # type: ignore[arg-type]  # the scale
    return all(
        reader in inside or reader.target is ASSERTION or name_of(reader) == _ROUNDED
        for one in (layer.rows, *choice.users)
        for reader in one.users
    )


class _Search:
    """Follows the pieces of one layer from its product on.

    Args:
        product: The product.
        constants: Names of the placeholders that no run changes.
    """

    def __init__(self, product: Node, constants: Collection[str]) -> None:
        self._product = product
        self._constants = constants
        self._pieces: dict[Node, None] = {product: None}

    def layer(self) -> IntegerLayer | None:
        """Return the layer, None where the product is none of one."""
        left, right = self._product.args[:2]
        assert isinstance(left, Node)
        assert isinstance(right, Node)
        turned = self._source(right)
        weight = self._source(turned.args[0]) if turned.target in _TURNS else None
        if (
            not isinstance(weight, Node)
            or not is_constant_source(weight, self._constants)
            or not _is_turned(turned)
            or _dtype(weight) != torch.int8
        ):
            return None
        self._pieces[turned] = None
        if self._product.target is _aten.mm.default:
            rows, scaled = self._float_rows(left), self._product
        else:
            rows, scaled = self._rounded(left, turned, weight)
        return None if rows is None else self._scaled(rows, scaled, weight)

    def _float_rows(self, left: Node) -> Node | None:
        """Return the rows as they were before they were laid out as one matrix."""
        if left.target not in _SAME or not isinstance(left.args[0], Node):
            return left
        rows, width = left.args[0], shape_of(left)[1:]
        if _dtype(rows) != _dtype(left) or not same_sizes(shape_of(rows)[-1:], width):
            return left
        self._pieces[left] = None
        return rows

    def _rounded(self, left: Node, turned: Node, weight: Node) -> tuple[Node | None, Node]:
        """Return what quantised the rows, and the products times the rows' scales."""
        at, rows = self._product, self._source(left)
        if rows.target is _aten.add.Tensor and rows.args[1] == 128:
            # Processors may multiply unsigned integers faster: moved here, moved back there.
            self._pieces[rows] = None
            rows = self._source(rows.args[0])
            at, moved = self._taken_off(at)
            if not self._is_sum(moved, turned, times=128):
                return None, at
        if name_of(rows) != _ROUNDED or not _is_by_row(rows):
            return None, at
        scale, zero = rows.args[2:4]
        at, factor = self._multiplied(at)
        if factor is None or self._source(factor) is not scale:
            return None, at
        after, moved = self._taken_off(at)
        if moved is None:
            # Without zero points: what is chosen must have none.
            symmetric = str(chosen_by(scale).args[1]) == "SYMMETRIC"
            return (rows if symmetric else None), at
        sums = self._factors(moved)
        points = self._factors(sums[0])
        by_scale = [self._source(one) for one in points] == [zero, scale]
        if not by_scale or not self._is_sum(sums[1], weight, times=1):
            return None, at
        return rows, after

    def _scaled(self, rows: Node, at: Node, weight: Node) -> IntegerLayer | None:
        at, factor = self._multiplied(at)
        scale = None if factor is None else self._source(factor)
        given, count = _real(rows), shape_of(weight)[0]
        if scale is None or given is None or not is_constant_source(scale, self._constants):
            return None
        size = fake(scale).numel()  # type: ignore[union-attr]  # a constant
        shape = (*shape_of(given)[:-1], count)
        if not (size in (1, count) and same_sizes(shape_of(given)[-1:], shape_of(weight)[1:])):
            return None
        last, bias = self._ending(at, shape, _dtype(given))
        if last is None or not self._is_closed(last):
            return None
        return IntegerLayer(rows, weight, scale, last, bias, self._pieces)

    def _ending(
        self, at: Node, shape: Sequence[object], dtype: torch.dtype | None
    ) -> tuple[Node | None, Node | None]:
        """Return the last piece, and the bias where one is added."""
        before = _run(at)
        end = _reader(before[-1])
        bias = end.args[1] if end is not None and end.target is _aten.add.Tensor else None
        if (
            end is not None
            and isinstance(bias, Node)
            and end.args[0] is before[-1]
            and arguments_of(end)["alpha"] == 1
            and is_constant_source(bias, self._constants)
            and same_sizes(shape_of(bias), shape[-1:])
        ):
            before, after = [*before, end], _run(end)
        else:
            bias, after, before = None, before, []
        for number, one in enumerate(after, 1):
            if same_sizes(shape_of(one), shape) and _dtype(one) == dtype:
                self._pieces.update(dict.fromkeys((*before, *after[:number])))
                return one, bias
        return None, None

    def _source(self, node: object) -> Node:
        """Return what a tensor was before it was laid out or cast otherwise."""
        assert isinstance(node, Node)
        while node.target in _SAME and isinstance(node.args[0], Node):
            self._pieces[node] = None
            node = node.args[0]
        return node

    def _step(self, at: Node, operator: object) -> tuple[Node, Node] | None:
        """Return the next call after casts if it is of an operator, and its other argument."""
        on_the_way = []
        reader = _reader(at)
        while reader is not None and reader.target in _SAME:
            on_the_way.append(reader)
            at, reader = reader, _reader(reader)
        if reader is None or reader.target is not operator or not isinstance(reader.args[1], Node):
            return None
        others = [one for one in reader.args[:2] if one is not at]
        if len(others) != 1 or arguments_of(reader).get("alpha", 1) != 1:
            return None
        self._pieces.update(dict.fromkeys((*on_the_way, reader)))
        return reader, others[0]  # type: ignore[return-value]  # the first of a call is a node

    def _multiplied(self, at: Node) -> tuple[Node, Node | None]:
        return self._step(at, _aten.mul.Tensor) or (at, None)

    def _taken_off(self, at: Node) -> tuple[Node, Node | None]:
        found = self._step(at, _aten.sub.Tensor)
        # What is taken off, not what it is taken off from.
        return (at, None) if found is None or found[0].args[1] is not found[1] else found

    def _factors(self, product: Node) -> tuple[Node, ...]:
        product = self._source(product)
        if product.target is not _aten.mul.Tensor or not all(
            isinstance(x, Node) for x in product.args
        ):
            return (product, product)
        self._pieces[product] = None
        return product.args  # type: ignore[return-value]  # nodes

    def _is_sum(self, node: Node | None, of: Node, *, times: int) -> bool:
        """Return whether a node is the sum of each output's weights, times a number."""
        if node is None:
            return False
        node = self._source(node)
        if times != 1:
            if node.target is not _aten.mul.Tensor or node.args[1] != times:
                return False
            self._pieces[node] = None
            node = self._source(node.args[0])
        if node.target is not _aten.sum.dim_IntList or node.args[0] is not of:
            return False
        self._pieces[node] = None
        return node.args[1] in ([0], [-2]) if of.target in _TURNS else node.args[1] in ([-1], [1])

    def _is_closed(self, last: Node) -> bool:
        """Return whether nobody else reads what is computed on the way."""
        for piece in list(self._pieces):
            for reader in piece.users:
                if reader.target is ASSERTION and piece is not last:
                    self._pieces[reader] = None
                elif reader not in self._pieces and piece is not last:
                    return False
        return True


def _run(node: Node) -> list[Node]:
    """Return a call and those after it that only lay out or cast what it returns."""
    found: list[Node] = [node]
    while (reader := _reader(found[-1])) is not None and reader.target in _SAME:
        found.append(reader)
    return found


def _reader(node: Node) -> Node | None:
    """Return who reads a tensor, if that is one."""
    readers = [one for one in node.users if one.target is not ASSERTION]
    return readers[0] if len(readers) == 1 else None


def _dtype(node: Node) -> torch.dtype | None:
    value = fake(node)
    return None if value is None else value.dtype


def _real(rows: Node) -> Node | None:
    given = rows.args[0] if name_of(rows) == _ROUNDED else rows
    known = isinstance(given, Node) and fake(given) is not None
    return given if known else None  # type: ignore[return-value]  # a node


def _is_turned(node: Node) -> bool:
    args = arguments_of(node)
    if "dims" in args:
        return [one % 2 for one in args["dims"]] == [1, 0]
    return bool(args.get("dim0", 0) % 2 != args.get("dim1", 1) % 2)


def _is_by_row(rows: Node) -> bool:
    """Return whether whole rows of floats are quantised to integers of 8 bits, or of 7."""
    args, scale = arguments_of(rows), rows.args[2]
    given, block = args["input"], args["block_size"]
    if not isinstance(scale, Node) or name_of(chosen_by(scale)) != _CHOSEN:
        return False
    low, high = args["quant_min"], args["quant_max"]
    return (low, high) in (_INT8, _SEVEN_BITS) and same_sizes(block[-1:], shape_of(given)[-1:])
