"""Tensors as records, of one shape for each combination of optional fields."""

from __future__ import annotations

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.flatbuffer.assembly import Assembly, Rank
from lowerdeck.serializer.flatbuffer.packing import byte_vector, int_vector
from lowerdeck.serializer.flatbuffer.sections import Records
from lowerdeck.serializer.flatbuffer.union_record import start_union_record
from lowerdeck.serializer.flatbuffer.wire import KERNEL_TYPES
from lowerdeck.serializer.pte.enums import ScalarType
from lowerdeck.serializer.pte.schema import AllocationDetails, ExtraTensorInfo, Tensor

_LOW_BITS = 0xFFFFFFFF
# The four small fields share one word of the table.
_SMALL_OFFSETS = {"scalar_type": 12, "requires_grad": 13, "layout": 14, "shape_dynamism": 15}
_OPTIONAL = ("data_buffer_idx", "allocation_info", "extra_tensor_info", "storage_offset")

# Of what a tensor's key holds from its fourth word on, words that are 0 are left out; those that
# are kept come with their index in the key.
_Shape = tuple[Records, list[int], list[int], list[int], list[tuple[int, list[int]]]]


class TensorEncoder:
    """Turns tensors into references to stored EValues."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._seen: dict[tuple[int, ...], int] = {}
        self._shapes: dict[tuple[bool, ...], _Shape] = {}
        self._allocations: dict[tuple[int, int, int], int] = {}
        self._allocation_records: dict[bool, tuple[Records, list[list[int]]]] = {}
        self._extras = ExtraEncoder(assembly)

    def add(self, tensor: Tensor) -> int:
        """Return a reference to an EValue that holds this tensor."""
        words = self._assembly.words
        allocation = tensor.allocation_info
        extra = tensor.extra_tensor_info
        key = (
            words.add(int_vector(tensor.sizes)),
            words.add(byte_vector(tensor.dim_order)),
            _small_word(tensor),
            tensor.data_buffer_idx,
            0 if allocation is None else self._allocation(allocation),
            0 if extra is None else self._extras.add(extra),
            tensor.storage_offset,
        )
        found = self._seen.get(key)
        if found is None:
            present = (key[3] != 0, key[4] != 0, key[5] != 0, key[6] != 0)
            records, sizes, orders, smalls, rest = self._shapes.get(present) or self._start(
                present
            )
            sizes.append(key[0])
            orders.append(key[1])
            smalls.append(key[2])
            for index, column in rest:
                column.append(key[index])
            found = self._seen[key] = records.append()
        return found

    def _start(self, present: tuple[bool, ...]) -> _Shape:
        names = [name for name, there in zip(_OPTIONAL, present, strict=True) if there]
        offsets = {"sizes": 4, "dim_order": 8, **_SMALL_OFFSETS}
        offsets |= {name: 16 + 4 * index for index, name in enumerate(names)}
        records = start_union_record(
            self._assembly,
            *("EValue", "val_type", "val", KERNEL_TYPES.index("Tensor")),
            *("Tensor", 16 + 4 * len(names), offsets),
        )
        sizes, orders = records.references(), records.references()
        smalls = records.numbers("I", "Tensor.scalar_type")
        rest = [
            (
                3 + _OPTIONAL.index(name),
                records.references()
                if name.endswith("_info")
                else records.numbers(*_NUMBERS[name]),
            )
            for name in names
        ]
        self._shapes[present] = records, sizes, orders, smalls, rest
        return self._shapes[present]

    def _allocation(self, details: AllocationDetails) -> int:
        key = (details.memory_id, details.memory_offset_low, details.memory_offset_high)
        found = self._allocations.get(key)
        if found is None:
            wide = key[2] != 0
            if wide not in self._allocation_records:
                self._allocation_records[wide] = self._start_allocations(wide)
            records, columns = self._allocation_records[wide]
            for column, word in zip(columns, key, strict=False):
                column.append(word)
            found = self._allocations[key] = records.append()
        return found

    def _start_allocations(self, wide: bool) -> tuple[Records, list[list[int]]]:
        names = ("memory_id", "memory_offset_low", "memory_offset_high")[: 3 if wide else 2]
        offsets = {name: 4 + 4 * index for index, name in enumerate(names)}
        records = self._assembly.records(Rank.CHILDREN)
        size = 4 + 4 * len(names)
        records.table(self._assembly.skeleton.vtable("AllocationDetails", size, offsets))
        return records, [records.numbers("I", f"AllocationDetails.{name}") for name in names]


_NUMBERS = {
    "data_buffer_idx": ("I", "Tensor.data_buffer_idx"),
    "storage_offset": ("i", "Tensor.storage_offset"),
}


class ExtraEncoder:
    """Turns ExtraTensorInfo into references to stored ones."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._seen: dict[tuple[int, ...], int] = {}
        self._shapes: dict[tuple[bool, bool], tuple[Records, list[list[int]]]] = {}

    def add(self, extra: ExtraTensorInfo) -> int:
        """Return a reference to a table that holds this."""
        name = extra.fully_qualified_name
        index = extra.mutable_data_segments_idx
        if not 0 <= index < 1 << 64:
            raise ProgramError(f"found mutable_data_segments_idx {index}, expected 64 bits")
        small = (
            _byte(extra.location, "location")
            | _byte(extra.device_type, "device_type") << 8
            | _byte(extra.device_index, "device_index") << 16
        )
        reference = 0 if name is None else self._assembly.words.add_string(name)
        key = (small, index & _LOW_BITS, index >> 32, reference)
        found = self._seen.get(key)
        if found is None:
            shape = (index != 0, name is not None)
            records, columns = self._shapes.get(shape) or self._start(shape)
            kept = (small, *(key[1:3] if index else ()), *(key[3:] if name is not None else ()))
            for column, word in zip(columns, kept, strict=True):
                column.append(word)
            found = self._seen[key] = records.append()
        return found

    def _start(self, shape: tuple[bool, bool]) -> tuple[Records, list[list[int]]]:
        indexed, named = shape
        offsets = {"location": 4, "device_type": 5, "device_index": 6}
        size = 8
        if indexed:
            offsets["mutable_data_segments_idx"] = 8
            size = 16
        if named:
            offsets["fully_qualified_name"] = size
            size += 4
        records = self._assembly.records(Rank.CHILDREN, alignment=8 if indexed else 4)
        records.table(self._assembly.skeleton.vtable("ExtraTensorInfo", size, offsets))
        what = "ExtraTensorInfo"
        columns = [records.numbers("I", what) for _ in range(3 if indexed else 1)]
        if named:
            columns.append(records.references())
            if indexed:
                # The next record's 64-bit index must be aligned as well.
                records.constant(0)
        self._shapes[shape] = records, columns
        return records, columns


def _small_word(tensor: Tensor) -> int:
    scalar_type, layout, dynamism = tensor.scalar_type, tensor.layout, tensor.shape_dynamism
    if not (0 <= scalar_type <= 127 and 0 <= layout <= 127 and 0 <= dynamism <= 127):
        raise ProgramError(
            f"found scalar_type {scalar_type}, layout {layout}, shape_dynamism {dynamism}; "
            f"expected small enumerations, such as {ScalarType.FLOAT!r}"
        )
    return scalar_type | bool(tensor.requires_grad) << 8 | layout << 16 | dynamism << 24


def _byte(number: int, name: str) -> int:
    if not -128 <= number <= 127:
        raise ProgramError(f"found {name} {number}, expected 8 bits")
    return number & 0xFF
