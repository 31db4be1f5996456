"""Specifications of tensors: constants in the file, planned in arenas, or of the caller."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch

from lowerdeck.runner.errors import ProgramError
from lowerdeck.serializer import Tensor as TensorValue
from lowerdeck.serializer import TensorDataLocation, TensorShapeDynamism
from lowerdeck.torch_base import DTYPES

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
        raise ProgramError(
            f"value {index} has the invalid shape {list(sizes)}; expected at most "
            f"{_MAX_RANK} sizes, each 0 or more"
        )
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
