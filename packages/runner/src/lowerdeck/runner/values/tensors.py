"""Tensors of a method: constants in the file, planned tensors in arenas, and others."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lowerdeck.runner.errors import ProgramError
from lowerdeck.runner.values.arena import Arena, require_memory, strides_of
from lowerdeck.serializer import Tensor as TensorValue
from lowerdeck.serializer import TensorDataLocation, TensorShapeDynamism
from lowerdeck.torch_base import DTYPES

if TYPE_CHECKING:
    from lowerdeck.runner.values.sources import ProgramData

_MAX_RANK = 16  # a limit of the runtime


class Origin(enum.Enum):
    """Location of the bytes of a tensor.

    ``CONSTANT``: in the file or the ``.ptd``, read-only. ``PLANNED``: in an arena. ``CALLER``: set
    by the caller, a move or a view; initially allocated by this runner.
    """

    CONSTANT = "constant"
    PLANNED = "planned"
    CALLER = "caller"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Description of a tensor in the file.

    Attributes:
        index: Value index in its method.
        sizes: Shape, or its upper bound.
        dim_order: Dimensions from outermost to innermost in memory.
        contiguous: Whether the dim order is contiguous.
        dynamic: Whether the shape may change between calls.
        capacity: Maximum number of elements.
        origin: Location of the bytes.
        memory_id: Arena of a planned tensor, else 0.
        offset: Byte offset of a planned tensor in its arena.
        name: Fully qualified name of a parameter or buffer, or "".
        has_state: Whether a planned tensor keeps its value between calls: it has an initial value
            or a name.
    """

    index: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    dim_order: tuple[int, ...]
    contiguous: bool
    dynamic: bool
    capacity: int
    origin: Origin
    memory_id: int
    offset: int
    name: str
    has_state: bool

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of the tensor at its upper bound."""
        return self.capacity * self.dtype.itemsize


def read_spec(index: int, value: TensorValue) -> TensorSpec:
    """Return the checked description of the tensor ``value``.

    Raises:
        ProgramError: The table is inconsistent or requires an unsupported feature.
    """
    if value.scalar_type not in DTYPES:
        raise ProgramError(
            f"value {index} has the element type {value.scalar_type!r}; this runner supports "
            "int, float, complex and bool tensors: store other data as torch.uint8"
        )
    if value.storage_offset:
        raise ProgramError(f"value {index} has a storage offset, which no runtime supports")
    if value.shape_dynamism == TensorShapeDynamism.DYNAMIC_UNBOUND:
        raise ProgramError(f"value {index} has no upper bound of its shape; export it with a max")
    sizes, dim_order = tuple(value.sizes), tuple(value.dim_order)
    if len(sizes) > _MAX_RANK or min(sizes, default=0) < 0:
        raise ProgramError(f"value {index} has the invalid shape {list(sizes)}")
    if sorted(dim_order) != list(range(len(sizes))):
        raise ProgramError(
            f"value {index} has the dim order {list(dim_order)}, not a permutation of its "
            f"{len(sizes)} dimensions"
        )
    info, extra = value.allocation_info, value.extra_tensor_info
    external = extra is not None and extra.location == TensorDataLocation.EXTERNAL
    if info is not None:
        origin = Origin.PLANNED
    elif external or value.data_buffer_idx > 0:
        origin = Origin.CONSTANT
    else:
        origin = Origin.CALLER
    name = (extra.fully_qualified_name or "") if extra is not None else ""
    return TensorSpec(
        index=index,
        dtype=DTYPES[value.scalar_type],
        sizes=sizes,
        dim_order=dim_order,
        contiguous=dim_order == tuple(range(len(sizes))),
        dynamic=value.shape_dynamism == TensorShapeDynamism.DYNAMIC_BOUND,
        capacity=math.prod(sizes),
        origin=origin,
        memory_id=info.memory_id if info is not None else 0,
        offset=info.memory_offset if info is not None else 0,
        name=name,
        has_state=info is not None and bool(name or external or value.data_buffer_idx),
    )


def make_tensor(
    spec: TensorSpec, value: TensorValue, arenas: Sequence[Arena], source: ProgramData
) -> torch.Tensor:
    """Return the tensor of ``spec`` on its memory.

    Raises:
        ProgramError: The bytes are missing, too few or outside of their arena.
    """
    extra = value.extra_tensor_info
    external = extra is not None and extra.location == TensorDataLocation.EXTERNAL
    if spec.origin is Origin.CALLER:
        require_memory(spec.nbytes, f"value {spec.index}")
        try:
            return torch.zeros(spec.capacity, dtype=spec.dtype).as_strided(
                spec.sizes, strides_of(spec.sizes, spec.dim_order)
            )
        except RuntimeError as error:
            raise ProgramError(
                f"value {spec.index} of shape {list(spec.sizes)}: {error}"
            ) from error
    data: memoryview | None = None
    if external:
        data = source.external(spec.name, spec)
    elif value.data_buffer_idx > 0:
        planned = spec.origin is Origin.PLANNED
        data = (source.initial if planned else source.constant)(value.data_buffer_idx)
    if spec.origin is Origin.CONSTANT:
        return _from_bytes(spec, data if data is not None else memoryview(b""))
    if not 0 < spec.memory_id < len(arenas):
        raise ProgramError(
            f"value {spec.index} has memory id {spec.memory_id}, but the method has "
            f"{len(arenas) - 1} planned memories (ids start at 1)"
        )
    arena = arenas[spec.memory_id]
    tensor = arena.view(spec.dtype, spec.sizes, spec.dim_order, spec.offset)
    if data is not None and spec.offset not in arena.initialised:
        tensor.copy_(_from_bytes(spec, data))
        arena.initialised.add(spec.offset)
    return tensor


def _from_bytes(spec: TensorSpec, data: memoryview) -> torch.Tensor:
    """Return a tensor on ``data`` without a copy."""
    if data.nbytes < spec.nbytes:
        raise ProgramError(
            f"value {spec.index} of shape {list(spec.sizes)} needs {spec.nbytes} bytes; "
            f"the file has {data.nbytes} for it"
        )
    strides = strides_of(spec.sizes, spec.dim_order)
    if spec.capacity == 0:
        return torch.empty(0, dtype=spec.dtype).as_strided(spec.sizes, strides)
    flat = torch.frombuffer(data, dtype=spec.dtype, count=spec.capacity)
    return flat.as_strided(spec.sizes, strides)
