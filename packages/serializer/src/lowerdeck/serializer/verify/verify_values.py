"""Checks that the runtime can load the values of one method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from lowerdeck.serializer.errors import (
    ContentError,
    FormatError,
    IndexRangeError,
    LimitError,
    MissingFieldError,
    OffsetError,
    SegmentError,
)
from lowerdeck.serializer.flatbuffer.limits import MAX_RANK, MAX_TENSOR_BYTES
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.enums import TensorDataLocation, TensorShapeDynamism


class StoredData(NamedTuple):
    """Offsets of constants or initial values, and the ends of their data.

    Attributes:
        starts: Offset of each entry in the file, by index.
        ends: End of the range that each entry may use.
        aligned: Whether tensors point into the file, so that elements must be aligned.
    """

    starts: Sequence[int]
    ends: Sequence[int]
    aligned: bool


class ValueVerifier:
    """Checks values one by one; each check names the field that is wrong."""

    def __init__(
        self,
        plan: schema.ExecutionPlan,
        constants: StoredData,
        mutable: StoredData,
        position: Callable[[int], int],
    ) -> None:
        """Create a verifier.

        Args:
            constants: The constants of the program.
            mutable: The initial values of the program.
            position: Maps the index of a value to an offset in the file.
        """
        self._plan = plan
        self._constants = constants
        self._mutable = mutable
        self._position = position
        self._index = 0

    def verify(self) -> None:
        """Check all values.

        Raises:
            FormatError: A value cannot be loaded, or would be loaded incorrectly.
        """
        for index, value in enumerate(self._plan.values):
            self._index = index
            val = value.val
            if isinstance(val, schema.Tensor):
                self._verify_tensor(val)
            elif isinstance(val, schema.TensorList | schema.OptionalTensorList):
                self._verify_tensors(val)
            elif isinstance(val, schema.IntList):
                self._verify_ints(val)

    def _verify_tensor(self, tensor: schema.Tensor) -> None:
        rank = len(tensor.sizes)
        if tensor.storage_offset:
            self._refuse(f"found storage_offset {tensor.storage_offset}, expected 0")
        if tensor.shape_dynamism is TensorShapeDynamism.DYNAMIC_UNBOUND:
            self._refuse(
                "found an unbounded shape, which the runtime rejects; give it an upper bound"
            )
        if rank > MAX_RANK:
            self._refuse(f"found {rank} dimensions, expected at most {MAX_RANK}", LimitError)
        if any(size < 0 for size in tensor.sizes):
            self._refuse(f"found sizes {tensor.sizes}, expected none below 0")
        if sorted(tensor.dim_order) != list(range(rank)):
            self._refuse(
                f"found dim_order {tensor.dim_order}, expected a permutation of {rank} dimensions"
            )
        if tensor.nbytes > MAX_TENSOR_BYTES:
            self._refuse(f"found {tensor.nbytes} bytes, expected below 2**63", LimitError)
        extra = tensor.extra_tensor_info
        external = extra is not None and extra.location is TensorDataLocation.EXTERNAL
        if external and extra is not None and not extra.fully_qualified_name:
            self._refuse("found external data without a name", MissingFieldError)
        allocation = tensor.allocation_info
        if allocation is not None:
            self._verify_allocation(tensor, allocation)
        if tensor.data_buffer_idx and not external:
            self._verify_data(tensor, self._constants if allocation is None else self._mutable)

    def _verify_allocation(
        self, tensor: schema.Tensor, allocation: schema.AllocationDetails
    ) -> None:
        memories = self._plan.non_const_buffer_sizes
        number = allocation.memory_id
        if not 1 <= number < len(memories):
            self._refuse(
                f"found memory_id {number}, expected 1 to {len(memories) - 1}", IndexRangeError
            )
        itemsize = tensor.scalar_type.itemsize
        if allocation.memory_offset % itemsize:
            self._refuse(
                f"found planned memory at {allocation.memory_offset}, expected a multiple of "
                f"{itemsize}, the size of an element",
                OffsetError,
            )
        end = allocation.memory_offset + tensor.nbytes
        if end > memories[number]:
            self._refuse(
                f"found planned memory up to byte {end} of memory {number}, which has "
                f"{memories[number]} bytes",
                IndexRangeError,
            )

    def _verify_data(self, tensor: schema.Tensor, stored: StoredData) -> None:
        index = tensor.data_buffer_idx
        label = "constants" if stored is self._constants else "initial values"
        if index >= len(stored.starts):
            self._refuse(
                f"found data_buffer_idx {index}, expected below {len(stored.starts)}, the number "
                f"of {label}",
                IndexRangeError,
            )
        start, end = stored.starts[index], stored.ends[index]
        if start + tensor.nbytes > end:
            self._refuse(
                f"found {tensor.nbytes} bytes of data at byte {start} of the file, but the "
                f"{label} end at {end}",
                SegmentError,
            )
        # The runtime reads constants in place and does not support misaligned ones.
        if stored.aligned and start % tensor.scalar_type.itemsize:
            self._refuse(
                f"found data at byte {start}, expected a multiple of "
                f"{tensor.scalar_type.itemsize}, the size of an element",
                OffsetError,
            )

    def _verify_tensors(self, items: schema.TensorList | schema.OptionalTensorList) -> None:
        optional = isinstance(items, schema.OptionalTensorList)
        values = self._plan.values
        for item in items.items:
            if optional and item == -1:
                continue
            if not 0 <= item < len(values):
                self._refuse(f"found item {item}, expected one of {len(values)}", IndexRangeError)
            kind = type(values[item].val)
            if kind is not schema.Tensor and not (optional and kind is schema.Null):
                self._refuse(
                    f"found item {item}, a {kind.__name__}, expected a Tensor", IndexRangeError
                )
            # The runtime creates values in order; a list can refer only to earlier ones.
            if item >= self._index:
                self._refuse(f"found item {item}, expected tensors that come before their list")

    def _verify_ints(self, items: schema.IntList) -> None:
        values = self._plan.values
        for item in items.items:
            if not 0 <= item < len(values) or type(values[item].val) is not schema.Int:
                self._refuse(
                    f"found item {item}, expected the index of an Int value", IndexRangeError
                )

    def _refuse(self, reason: str, kind: type[FormatError] = ContentError) -> NoReturn:
        name = type(self._plan.values[self._index].val).__name__
        raise kind(
            reason,
            field=f"method {self._plan.name!r}.values[{self._index}] ({name})",
            offset=self._position(self._index),
        )
