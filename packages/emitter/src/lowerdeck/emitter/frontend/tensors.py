"""Create IR values from fake and real tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from lowerdeck.emitter.errors import UnboundedSizeError, UnsupportedError
from lowerdeck.emitter.ir.values import (
    DimOrder,
    Role,
    ScalarValue,
    TensorValue,
    Value,
    channels_last_order,
    contiguous_order,
)
from lowerdeck.torch_base import (
    SCALAR_TYPES,
    expression_of,
    is_channels_last,
    is_traceable_wrapper_subclass,
    plain_number,
    size_range,
    varies,
)

_MAX_RANK = 16
_TAKES_BOUNDS = "in lower, EmitConfig or LowerdeckExporter (--bounds on the command line)"


class ValueFactory:
    """Factory of the values of one method.

    Args:
        method: Name of the method, for messages.
        dimension_names: Name of each input dimension, keyed by the symbol's name.
        ranges: Range of each symbol.
    """

    def __init__(
        self,
        method: str,
        dimension_names: Mapping[str, str] = MappingProxyType({}),
        ranges: Mapping[Any, Any] = MappingProxyType({}),
    ) -> None:
        self._method = method
        self._dimension_names = dimension_names
        self._ranges = ranges
        self._bounds: dict[Any, int | None] = {}

    def tensor(
        self, name: str, fake: torch.Tensor, *, order: DimOrder | None = None
    ) -> TensorValue:
        """Return the value for a tensor of the graph.

        Args:
            fake: The tensor in the node's metadata.
            order: The dimensions from the outermost in memory to the innermost; contiguous when
                None.

        Raises:
            UnboundedSizeError: If a size has no upper bound.
            UnsupportedError: If the runtime does not support the tensor.
        """
        _check(name, fake)
        shape = tuple(map(plain_number, fake.shape))
        sizes = tuple(
            size if isinstance(size, int) else self._bound(name, dim, size)
            for dim, size in enumerate(shape)
        )
        return TensorValue(
            name,
            fake.dtype,
            shape,
            sizes,
            order if order is not None else contiguous_order(len(sizes)),
        )

    def constant(self, name: str, tensor: torch.Tensor, key: str = "") -> TensorValue:
        """Return the value for a constant tensor.

        Args:
            tensor: The tensor; its memory is not copied.
            key: Name of the parameter or buffer in the model.
        """
        value = self.tensor(name, tensor, order=layout_of(tensor))
        value.constant = tensor.detach()
        value.key = key
        value.fixed_role = Role.CONSTANT
        return value

    def value(self, name: str, meta: Any) -> Value | Any:
        """Return the value for a node's metadata; a literal is returned unchanged."""
        if isinstance(meta, torch.Tensor):
            return self.tensor(name, meta)
        if isinstance(meta, torch.SymInt):
            return ScalarValue(name, int, 0) if varies(meta) else plain_number(meta)
        if isinstance(meta, torch.SymBool):
            return ScalarValue(name, bool, False)
        if isinstance(meta, torch.SymFloat):
            return ScalarValue(name, float, 0.0)
        return meta

    def limit(self, size: Any, bound: int) -> None:
        """Set the upper bound of a size for which torch's bound is missing or wrong.

        Args:
            size: The size in a node's metadata; integers are ignored.
        """
        if varies(size):
            self._bounds[expression_of(size)] = bound

    def _bound(self, name: str, dim: int, size: torch.SymInt) -> int:
        # Cached by expression: thousands of values share a few expressions, and sympy is slow.
        key = expression_of(size)
        if key not in self._bounds:
            self._bounds[key] = size_range(size, self._ranges)[1]
        bound = self._bounds[key]
        if bound is None:
            symbols = sorted(str(symbol) for symbol in key.free_symbols)
            named = [self._dimension_names[s] for s in symbols if s in self._dimension_names]
            cure = (
                f'give it a max: torch.export.Dim("{named[0]}", max=...) at export, or '
                f'bounds={{"{named[0]}": ...}} {_TAKES_BOUNDS}'
                if named
                else "it depends on data; give it a max: torch._check(size <= limit) in the "
                f'model, or bounds={{"{symbols[0]}": ...}} {_TAKES_BOUNDS}'
            )
            called = f" ({', '.join(named)})" if named else ""
            raise UnboundedSizeError(
                f"method {self._method!r}: dimension {dim} of {name!r} is {key}{called} and has "
                f"no upper bound, but memory is planned before the program runs; {cure}"
            )
        return bound


def layout_of(tensor: torch.Tensor) -> DimOrder:
    """Return the layout of a tensor.

    Channels-last if the strides are channels-last and not also contiguous; otherwise contiguous.
    """
    rank = tensor.dim()
    return channels_last_order(rank) if is_channels_last(tensor) else contiguous_order(rank)


def _check(name: str, tensor: torch.Tensor) -> None:
    if is_traceable_wrapper_subclass(tensor):
        raise UnsupportedError(
            f"{name!r} is a {type(tensor).__name__}, a wrapper subclass without storage: replace "
            "it by a plain tensor before export"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedError(
            f"{name!r} is a {tensor.layout} tensor of {tensor.dtype}; the runtime supports only "
            "strided, unquantized tensors: call to_dense() or dequantize() in the model"
        )
    if tensor.dtype not in SCALAR_TYPES:
        raise UnsupportedError(
            f"{name!r} is a tensor of {tensor.dtype}, which the file format does not support: "
            "keep its bytes as torch.uint8 in the model, or give its users to a delegate"
        )
    if tensor.dim() > _MAX_RANK:
        raise UnsupportedError(
            f"{name!r} has {tensor.dim()} dimensions; the runtime allows up to {_MAX_RANK}"
        )
