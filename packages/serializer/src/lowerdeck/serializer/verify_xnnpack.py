"""Whether an XNNPACK payload can run: what the runtime takes from it without a check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from lowerdeck.serializer import schema
from lowerdeck.serializer.enums import ScalarType
from lowerdeck.serializer.xnnpack_payload import (
    NONE,
    XnnpackNode,
    XnnpackValue,
    damaged,
    read_xnnpack,
)

BACKEND = "XnnpackBackend"
_INPUT, _OUTPUT = 1, 2
_MAX_EXTERNALS = 4096
_MAX_RANK = 6
# The runtime multiplies sizes and takes memory for them before it looks at the arguments.
_MAX_ELEMENTS = 1 << 31
_MAX_FIELD = 1 << 24
_CONVOLUTIONS = {"Conv2d", "DepthwiseConv2d", "ConvTranspose2d"}
_PACKING = {"FullyConnected", *_CONVOLUTIONS}

# Bits of an element by XNNPACK's number of the datatype.
_BITS = {
    1: 32,
    2: 16,
    3: 8,
    4: 8,
    5: 32,
    6: 8,
    7: 32,  # floats and integers
    8: 4,
    9: 8,
    10: 4,
    11: 8,
    12: 32,
    13: 32,
    14: 16,
}
# What the program's tensors must be; an index is an int32 that the runtime widens in place.
_PROGRAM_TYPES = {
    1: {ScalarType.FLOAT},
    2: {ScalarType.HALF},
    3: {ScalarType.CHAR},
    4: {ScalarType.BYTE},
    12: {ScalarType.INT, ScalarType.LONG},
    14: {ScalarType.BFLOAT16},
}
_TRANSPOSED = 1
"""The flag of a linear layer whose filter is [inputs, outputs]."""
# Beginnings of the names of fields that must not be 0.
_FROM_ONE = {"kernel", "subsampling", "dilation", "groups", "group", "pooling", "stride"}
_OPTIONAL = {"bias_id", "mask_id"}
_JOINED = {"Concatenate2": 2, "Concatenate3": 3, "Concatenate4": 4, "Concatenate5": 5}


class XnnpackVerifier:
    """Checks one payload, and then each call of it."""

    def __init__(self, blob: memoryview, named: Mapping[str, int]) -> None:
        """Read and check a payload.

        Args:
            blob: The bytes of the delegate.
            named: Number of bytes of each entry of the file's named data.

        Raises:
            FormatError: The payload is damaged, or the runtime would crash or hang on it.
        """
        self._payload = read_xnnpack(blob)
        self._named = named
        self._values: dict[int, XnnpackValue] = {}
        payload = self._payload
        if payload.num_externs > _MAX_EXTERNALS:
            raise damaged(
                f"found {payload.num_externs} arguments, expected at most {_MAX_EXTERNALS}"
            )
        for value in payload.values:
            self._verify_value(value)
        self._externals = {
            value.external_id: value for value in payload.values if value.external_id != NONE
        }
        count = Counter(one.external_id for one in payload.values if one.external_id != NONE)
        if any(times > 1 for times in count.values()):
            raise damaged("found two XNNPACK values for one argument")
        for node in payload.nodes:
            self._verify_node(node)
        self._verify_order()

    def verify_call(self, tensors: Sequence[schema.KernelTypes]) -> None:
        """Check the arguments of one call.

        Args:
            tensors: The values that the call passes, inputs and then outputs.

        Raises:
            FormatError: Too few, or tensors that the payload cannot take.
        """
        if len(tensors) < self._payload.num_externs:
            raise damaged(
                f"found {len(tensors)} arguments of an XNNPACK delegate, expected "
                f"{self._payload.num_externs}"
            )
        for position, value in self._externals.items():
            tensor = tensors[position]
            if not isinstance(tensor, schema.Tensor):
                kind = type(tensor).__name__
                raise damaged(f"found a {kind} as argument {position}, expected a Tensor")
            wanted = _PROGRAM_TYPES.get(value.dtype, set())
            if tensor.scalar_type not in wanted:
                names = " or ".join(kind.name for kind in wanted) or "no tensor"
                raise damaged(
                    f"found {tensor.scalar_type.name} as argument {position} of an XNNPACK "
                    f"delegate, expected {names}"
                )
            if len(tensor.sizes) > _MAX_RANK:
                raise damaged(
                    f"found {len(tensor.sizes)} dimensions in argument {position}, expected at "
                    f"most {_MAX_RANK}"
                )

    def _verify_value(self, value: XnnpackValue) -> None:
        what = f"XNNPACK value {value.id}"
        payload = self._payload
        if value.id in self._values:
            raise damaged(f"found two of {what}")
        self._values[value.id] = value
        if value.dtype not in _BITS:
            raise damaged(f"found the datatype {value.dtype} of {what}")
        if len(value.dims) > _MAX_RANK:
            raise damaged(f"found {len(value.dims)} dimensions of {what}")
        if value.flags not in (0, 1, 2):
            raise damaged(f"found the flags {value.flags} of {what}, expected 0, 1 or 2")
        if bool(value.flags) != (value.external_id != NONE):
            raise damaged(f"found {what}, of which flags and external id disagree")
        if value.external_id != NONE and value.external_id >= payload.num_externs:
            raise damaged(f"found {what} as argument {value.external_id} of {payload.num_externs}")
        elements = math.prod(value.dims)
        if max((elements, *value.dims)) >= _MAX_ELEMENTS:
            raise damaged(f"found the sizes {value.dims} of {what}, expected below 2**31 elements")
        if value.constant:
            self._verify_constant(value.constant, (elements * _BITS[value.dtype] + 7) // 8, what)
        if value.quantized in (1, 4) and value.dims:
            self._verify_scales(value, elements, what)

    def _verify_scales(self, value: XnnpackValue, elements: int, what: str) -> None:
        if not 0 <= value.channel_dim < len(value.dims):
            raise damaged(f"found the dimension {value.channel_dim} of channels of {what}")
        count = value.dims[value.channel_dim]
        if value.quantized == 4:
            if value.group < 1:
                raise damaged(f"found groups of {value.group} elements of {what}")
            count = elements // value.group
        if value.scale_constant:
            width = 2 if value.quantized == 4 else 4
            self._verify_constant(value.scale_constant, count * width, f"the scales of {what}")
        elif len(value.scales) < count:
            raise damaged(f"found {len(value.scales)} scales of {what}, expected {count}")

    def _verify_constant(self, number: int, needed: int, what: str) -> None:
        constants = self._payload.constants
        if number >= len(constants):
            raise damaged(f"found constant {number} of {len(constants)} for {what}")
        constant = constants[number]
        if constant.key is None:
            if constant.offset + max(constant.size, needed) > self._payload.inside:
                raise damaged(
                    f"found {what} at {constant.offset} of {self._payload.inside} bytes of "
                    f"constants, expected {needed} there"
                )
        elif self._named.get(constant.key, needed) < needed:
            raise damaged(
                f"found {self._named[constant.key]} bytes of named data for {what}, expected "
                f"{needed}"
            )

    def _verify_node(self, node: XnnpackNode) -> None:
        for name, number in node.fields.items():
            if not name.endswith("_id") or (number == NONE and name in _OPTIONAL):
                continue
            joined = _JOINED.get(node.kind)
            if joined and name.startswith("input") and int(name[5]) > joined:
                continue
            if number not in self._values:
                raise damaged(f"found value {number} as {name} of {node.kind}, which is not there")
            continue
        _verify_fields(node)
        _verify_lists(node, self._values)
        if node.kind in _PACKING:
            self._verify_packing(node)

    def _verify_order(self) -> None:
        """Refuse values that nothing makes, that two nodes make, or that make themselves."""
        makers: dict[int, int] = {}
        for number, node in enumerate(self._payload.nodes):
            for made in _ids(node, outputs=True):
                value = self._values[made]
                if made in makers or value.constant or value.flags == _INPUT:
                    raise damaged(
                        f"found value {made} as the result of {node.kind}, which is given already"
                    )
                makers[made] = number
        for value in self._values.values():
            if value.flags == _OUTPUT and value.id not in makers:
                raise damaged(f"found the output {value.id}, which no node makes")
        users: dict[int, list[int]] = {}
        missing: dict[int, int] = {}
        for number in range(len(self._payload.nodes)):
            sources = self._made_by(number, makers)
            missing[number] = len(sources)
            for source in sources:
                users.setdefault(source, []).append(number)
        ready = [number for number, count in missing.items() if not count]
        for number in ready:
            for user in users.get(number, ()):
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
        if len(ready) < len(missing):
            raise damaged("found nodes that wait for each other")

    def _made_by(self, number: int, makers: Mapping[int, int]) -> set[int]:
        node = self._payload.nodes[number]
        found = set()
        for read in _ids(node, outputs=False):
            value = self._values[read]
            if value.constant or value.flags == _INPUT:
                continue
            if read not in makers:
                raise damaged(f"found value {read} as input of {node.kind}, which no node makes")
            found.add(makers[read])
        return found

    def _verify_packing(self, node: XnnpackNode) -> None:
        """Refuse weights that the runtime frees before it packs them once more."""
        filters = self._values[node.fields["filter_id"]]
        bias = self._values.get(node.fields["bias_id"])
        if bias is not None and bool(bias.constant) != bool(filters.constant):
            raise damaged(
                f"found a {node.kind} of which exactly one of filter and bias is constant: the "
                "runtime frees that one and reads it again, and dies if the file is mapped"
            )
        if filters.constant and (wanted := _filter_dims(node)) and filters.dims != wanted:
            raise damaged(
                f"found a filter {filters.dims} of {node.kind}, expected {wanted} by its fields"
            )
        if bias is not None and bias.constant:
            _verify_bias(node, filters, bias)
        if not math.prod(filters.dims) and filters.constant:
            raise damaged(f"found a filter of {node.kind} without elements")


def _ids(node: XnnpackNode, *, outputs: bool) -> list[int]:
    """Return the values that a node makes, or those that it reads."""
    joined = _JOINED.get(node.kind, len(_JOINED) + 1)
    return [
        number
        for name, number in node.fields.items()
        if name.endswith("_id")
        and name.startswith("output") == outputs
        and not (number == NONE and name in _OPTIONAL)
        and not (name.startswith("input") and name[5:6].isdigit() and int(name[5]) > joined)
    ]


def _filter_dims(node: XnnpackNode) -> tuple[int, ...] | None:
    """Return the sizes that the filter of a convolution must have."""
    if node.kind not in _CONVOLUTIONS:
        return None
    field = node.fields
    window = (field["kernel_height"], field["kernel_width"])
    outputs = field["groups"] * field["group_output_channels"]
    if node.kind == "DepthwiseConv2d":
        return (1, *window, outputs)
    return (outputs, *window, field["group_input_channels"])


def _verify_bias(node: XnnpackNode, filters: XnnpackValue, bias: XnnpackValue) -> None:
    if node.kind in _CONVOLUTIONS:
        outputs = node.fields["groups"] * node.fields["group_output_channels"]
    else:
        outputs = filters.dims[node.fields["flags"] & _TRANSPOSED] if len(filters.dims) > 1 else 0
    if math.prod(bias.dims) < outputs:
        raise damaged(f"found a bias {bias.dims} of {node.kind}, expected {outputs} elements")


def _verify_fields(node: XnnpackNode) -> None:
    """Refuse sizes, strides and dilations that the runtime divides by or multiplies."""
    for name, number in node.fields.items():
        if name.endswith("_id") or name == "flags":
            continue
        first = name.partition("_")[0]
        least = first in _FROM_ONE and (first != "dilation" or node.kind != "AvgPooling2d")
        if not least <= number <= _MAX_FIELD:
            raise damaged(
                f"found {number} as {name} of {node.kind}, expected {int(least)} to {_MAX_FIELD}"
            )
    for name, items in node.lists.items():
        if items and max(items) > _MAX_FIELD:
            raise damaged(f"found {max(items)} in {name} of {node.kind}")


def _verify_lists(node: XnnpackNode, values: Mapping[int, XnnpackValue]) -> None:
    count = node.fields.get("num_dims")
    for name, items in node.lists.items():
        wanted = len(values[node.fields["input_id"]].dims) if count is None else count
        if len(items) < wanted or wanted > _MAX_RANK:
            raise damaged(
                f"found {len(items)} {name} of {node.kind}, expected {wanted}, at most {_MAX_RANK}"
            )
    if node.kind == "StaticTranspose" and sorted(node.lists["perm"][:count]) != list(
        range(count or 0)
    ):
        raise damaged(f"found the order {node.lists['perm']}, expected one of {count} sizes")
