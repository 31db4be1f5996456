"""Optimise a complete payload: remove unneeded computations and data movement."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from lowerdeck.serializer import XnnConstant, XnnGraph, XnnNode, XnnOperator, XnnValue
from lowerdeck.xnnpack.emit.computed import compute_constants
from lowerdeck.xnnpack.emit.emission import Emission
from lowerdeck.xnnpack.emit.moves import merge_moves

_CONVOLUTIONS = (XnnOperator.CONV2D, XnnOperator.DEPTHWISE_CONV2D)
_BY_ELEMENT = {
    one for one in XnnOperator if one.table in ("Unary", "Binary", "LeakyReLU", "ELU")
} - {
    *(XnnOperator.SOFTMAX, XnnOperator.CONVERT, XnnOperator.GLOBAL_AVG_POOLING_2D),
    XnnOperator.BATCH_MATRIX_MULTIPLY,
}
_SIDES = ("padding_top", "padding_right", "padding_bottom", "padding_left")
_TILE = 32
"""Channels of a part are multiples of this, to fill the tiles of the runtime's kernels."""


def tidy(emission: Emission) -> None:
    """Remove unneeded computations, copies and constants from a payload.

    Args:
        emission: A payload with all inputs and outputs; its values are renumbered.
    """
    _fold_padding(emission.graph)
    _part_layers(emission)
    _drop_unread(emission)
    _keep_image_layout(emission)
    merge_moves(emission)
    _drop_unread(emission)
    readers = defaultdict[int, set[XnnOperator]](set)
    for node in emission.graph.nodes:
        for value in node.inputs:
            readers[value].add(node.operator)
    compute_constants(emission, readers)
    _renumber(emission)


class _Uses:
    """Producers and readers of each value."""

    def __init__(self, graph: XnnGraph) -> None:
        self._graph = graph
        self.maker: dict[int, int] = {}
        self.readers: defaultdict[int, list[int]] = defaultdict(list)
        for number, node in enumerate(graph.nodes):
            self.maker[node.number("output_id")] = number
            for value in node.inputs:
                self.readers[value].append(number)

    def single_use_producer(self, value: int, kind: XnnOperator) -> XnnNode | None:
        """Return the producer of a value if it has the given kind and the value has one reader."""
        number = self.maker.get(value)
        if number is None or len(self.readers[value]) != 1 or self._graph.values[value].flags:
            return None
        node = self._graph.nodes[number]
        return node if node.operator is kind else None

    def read_by(self, value: int, kinds: Set[XnnOperator]) -> bool:
        """Return whether only nodes of some kinds read a value."""
        return all(self._graph.nodes[reader].operator in kinds for reader in self.readers[value])


# -- lines as images


def _keep_image_layout(emission: Emission) -> None:
    """Keep the image layout between 1-D convolutions instead of converting to lines.

    A 1-D convolution converts its result from an image of one row to a line, and the next one
    converts it back, which is a copy if the line has other readers.
    """
    graph = emission.graph
    if not any(_converts_between_images_and_lines(graph, node) for node in graph.nodes):
        return
    uses = _Uses(graph)
    images: dict[int, int] = {}
    renamed: dict[int, int] = {}
    changed: dict[int, list[tuple[XnnNode, int]]] = {}
    for number, node in enumerate(graph.nodes):
        result = graph.values[node.number("output_id")]
        if node.operator is XnnOperator.STATIC_RESHAPE:
            source = graph.values[node.number("input_id")]
            if len(result.shape) == 3 and source.shape == _row(result.shape):
                images[result.id] = renamed.get(source.id, source.id)
            elif (
                len(source.shape) == 3 and result.shape == _row(source.shape) and not result.flags
            ):
                renamed[result.id] = images.setdefault(source.id, result.id)
        elif (operands := _operands(graph, uses, node, images)) is not None:
            image_value = images[result.id] = emission.value_like(result, _row(result.shape))
            back = {"num_dims": 3, "input_id": image_value, "output_id": result.id}
            line = XnnNode(XnnOperator.STATIC_RESHAPE, {**back, "new_shape": result.shape})
            image = node.reading(operands | {result.id: image_value})
            changed[number] = [(image, number), (line, number)]
        elif any(value_id in renamed for value_id in node.inputs):
            changed[number] = [(node.reading(renamed), number)]
    if changed:
        _replace(emission, changed)


def _converts_between_images_and_lines(graph: XnnGraph, node: XnnNode) -> bool:
    """Return whether a node converts images of one row to lines, or vice versa."""
    if node.operator is not XnnOperator.STATIC_RESHAPE:
        return False
    ids = node.number("input_id"), node.number("output_id")
    line, image = sorted((graph.values[value_id].shape for value_id in ids), key=len)
    return len(line) == 3 and image == _row(line)


def _operands(
    graph: XnnGraph, uses: _Uses, node: XnnNode, images: Mapping[int, int]
) -> dict[int, int] | None:
    """Return the operands of a node as images, or None if it cannot be computed on images."""
    if node.operator not in _BY_ELEMENT or len(graph.values[node.number("output_id")].shape) != 3:
        return None
    operands = {}
    for operand in node.inputs:
        value = graph.values[operand]
        # Other readers of the line would need a copy of the image.
        if operand in images and uses.read_by(operand, _BY_ELEMENT | {XnnOperator.STATIC_RESHAPE}):
            operands[operand] = images[operand]
        elif value.constant and (len(value.shape) < 3 or value.shape[0] == 1):
            operands[operand] = operand
        else:
            return None
    return operands if any(operand in images for operand in operands) else None


# -- zeros before convolutions


def _fold_padding(graph: XnnGraph) -> None:
    if not any(node.operator is XnnOperator.STATIC_CONSTANT_PAD for node in graph.nodes):
        return
    uses = _Uses(graph)
    for number, node in enumerate(graph.nodes):
        # A 1x1 convolution without padding is a matrix product, which is faster.
        if node.operator in _CONVOLUTIONS and (_kernel(node) != (1, 1)):
            graph.nodes[number] = _padding(graph, uses, node)


def _kernel(node: XnnNode) -> tuple[int, int]:
    return node.number("kernel_height"), node.number("kernel_width")


def _padding(graph: XnnGraph, uses: _Uses, node: XnnNode) -> XnnNode:
    """Return a convolution with the zero padding before it fused, if possible."""
    image = node.number("input1_id")
    line = uses.single_use_producer(image, XnnOperator.STATIC_RESHAPE)
    padded = image if line is None else line.number("input_id")
    pad = uses.single_use_producer(padded, XnnOperator.STATIC_CONSTANT_PAD)
    if pad is None or pad.fields.get("padding_value", 0.0) != 0.0:
        return node
    source = pad.number("input_id")
    dims = graph.values[source].shape
    before, after = pad.numbers("pre_paddings"), pad.numbers("post_paddings")
    if line is not None:
        wide = graph.values[padded].shape
        if len(wide) != 3 or line.numbers("new_shape") != _row(wide):
            return node
        dims, before, after = _row(dims), _row(before, 0), _row(after, 0)
    # A dynamic size may be 0: the runtime pads an empty tensor, but fails to convolve it.
    if len(dims) != 4 or before[0] or before[3] or after[0] or after[3] or 0 in dims[1:3]:
        return node
    if line is not None:
        number = uses.maker[image]
        fields = {**line.fields, "input_id": source, "new_shape": dims}
        graph.nodes[number] = replace(line, fields=fields)
        graph.values[image].shape, source = dims, image
    amounts = zip(_SIDES, (before[1], after[2], after[1], before[2]), strict=True)
    sides = {name: node.number(name) + amount for name, amount in amounts}
    return replace(node, fields={**node.fields, "input1_id": source, **sides})


def _row(line: Sequence[int], height: int = 1) -> tuple[int, ...]:
    """Convert per-dimension numbers of a 1-D operator to those of images of height 1."""
    return (line[0], height, *line[1:])


# -- parts of layers


def _part_layers(emission: Emission) -> None:
    """Split layers whose results are only read in parts along the channels."""
    graph = emission.graph
    if not any(node.operator is XnnOperator.STATIC_SLICE for node in graph.nodes):
        return
    uses = _Uses(graph)
    readers = Counter[XnnConstant | None]()
    for value in graph.values:
        readers[value.constant] += len(uses.readers[value.id])
    changed: dict[int, list[tuple[XnnNode, int]]] = {}
    for number, node in enumerate(graph.nodes):
        weights = _weights(node) if _has_rows(graph, node) else []
        alone = all(readers[graph.values[weight].constant] == 1 for weight in weights)
        shaped, parts = _parts(graph, uses, node) if weights and alone else ([], [])
        for removed in (*shaped, *parts):
            changed[removed] = []
        if parts:
            views = [graph.nodes[weight] for weight in shaped]
            changed[number] = [
                (new_node, part)
                for part in parts
                for new_node in _layer_of_part(emission, node, views, graph.nodes[part])
            ]
    if changed:
        _replace(emission, changed)


def _weights(node: XnnNode) -> list[int]:
    return list(node.inputs[1:])


def _has_rows(graph: XnnGraph, node: XnnNode) -> bool:
    """Return whether the output channels of a node are the rows of its constant filters."""
    if node.operator is XnnOperator.CONV2D:
        if node.number("groups") != 1:
            return False
    elif node.operator is not XnnOperator.FULLY_CONNECTED or node.fields.get("flags"):
        return False
    return all(graph.values[weight].constant for weight in _weights(node))


def _parts(graph: XnnGraph, uses: _Uses, node: XnnNode) -> tuple[list[int], list[int]]:
    """Return the reshape of a result, if there is one, and the slices that partition it."""
    shaped: list[int] = []
    value = node.number("output_id")
    channels = graph.values[node.number("filter_id")].shape[0]
    readers = uses.readers[value]
    if len(readers) == 1 and graph.nodes[readers[0]].operator is XnnOperator.STATIC_RESHAPE:
        if graph.values[value].flags:
            return [], []
        shaped = readers
        value = graph.nodes[shaped[0]].number("output_id")
    dims = graph.values[value].shape
    if graph.values[value].flags or dims[-1:] != (channels,) or len(uses.readers[value]) < 2:
        return [], []
    ends = 0
    for number in sorted(uses.readers[value], key=lambda reader: _start(graph.nodes[reader])):
        node = graph.nodes[number]
        if node.operator is not XnnOperator.STATIC_SLICE:
            return [], []
        offsets, sizes = node.numbers("offsets"), node.numbers("sizes")
        whole = not any(offsets[:-1]) and not any(sizes[:-1])
        if not whole or offsets[-1] != ends or sizes[-1] % _TILE or not sizes[-1]:
            return [], []
        ends += sizes[-1]
    return (shaped, uses.readers[value]) if ends == channels else ([], [])


def _start(node: XnnNode) -> int:
    return node.numbers("offsets")[-1] if node.operator is XnnOperator.STATIC_SLICE else -1


def _layer_of_part(
    emission: Emission, layer: XnnNode, views: Sequence[XnnNode], part: XnnNode
) -> Iterator[XnnNode]:
    """Yield the layer that computes a slice, and the views of its result."""
    graph = emission.graph
    start, size = _start(part), part.numbers("sizes")[-1]
    fields = dict(layer.fields)
    for name in ("filter_id", "bias_id"):
        if fields[name] != XnnNode.NONE:
            fields[name] = emission.rows_of(layer.number(name), start, size)
    if layer.operator is XnnOperator.CONV2D:
        fields["group_output_channels"] = size
    result = part.number("output_id")
    if not views:
        yield replace(layer, fields={**fields, "output_id": result})
        return
    (view,) = views
    whole = graph.values[layer.number("output_id")]
    part_result = emission.value_like(whole, (*whole.shape[:-1], size))
    yield replace(layer, fields={**fields, "output_id": part_result})
    shape = (*view.numbers("new_shape")[:-1], size)
    yield replace(
        view,
        fields={**view.fields, "input_id": part_result, "new_shape": shape, "output_id": result},
    )


def _replace(emission: Emission, changed: Mapping[int, Sequence[tuple[XnnNode, int]]]) -> None:
    """Replace nodes; each new node gets the sources of the two nodes that it combines."""
    nodes, sources = emission.graph.nodes, emission.sources
    kept = [
        pair
        for number, node in enumerate(nodes)
        for pair in (
            [(new_node, (*sources[number], *sources[part])) for new_node, part in changed[number]]
            if number in changed
            else [(node, sources[number])]
        )
    ]
    nodes[:] = [node for node, _ in kept]
    sources[:] = [tuple(dict.fromkeys(node_sources)) for _, node_sources in kept]


# -- unused nodes


def _drop_unread(emission: Emission) -> None:
    """Remove dead nodes."""
    graph = emission.graph
    read = {value.id for value in graph.values if value.flags & XnnValue.OUTPUT}
    unread: dict[int, Sequence[tuple[XnnNode, int]]] = {}
    for number, node in reversed(list(enumerate(graph.nodes))):
        if node.number("output_id") in read:
            read.update(node.inputs)
        else:
            unread[number] = ()
    if unread:
        _replace(emission, unread)


def _renumber(emission: Emission) -> None:
    """Remove unused values and constants, and renumber the others."""
    graph = emission.graph
    used = {item for node in graph.nodes for item in (*node.inputs, *node.outputs)}
    values = [item for item in graph.values if item.id in used or item.external_id is not None]
    numbers = {value.id: number for number, value in enumerate(values)}
    constants = {
        item for value in values for item in (value.constant, value.encoding.scale_constant)
    }
    graph.nodes[:] = [node.reading(numbers, place) for place, node in enumerate(graph.nodes)]
    for value in values:
        value.id = numbers[value.id]
    graph.values[:] = values
    graph.constants[1:] = [item for item in graph.constants[1:] if item in constants]
    for ids in (graph.input_ids, graph.output_ids):
        ids[:] = [numbers[item] for item in ids]
