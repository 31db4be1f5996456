"""Records of a union: the table that names the member, and the member right after it."""

from __future__ import annotations

from collections.abc import Mapping

from lowerdeck.serializer.flatbuffer.assembly import Assembly, Rank
from lowerdeck.serializer.flatbuffer.sections import Records

# Three words: the way to the vtable, the member's number, the offset to it. The member comes
# right after them, so the offset is always the 4 bytes that it takes itself.
_SIZE = 12
_TYPE_OFFSET = 4
_VALUE_OFFSET = 8
_TO_MEMBER = 4


def start_union_record(
    assembly: Assembly,
    holder: str,
    type_field: str,
    value_field: str,
    number: int,
    member: str,
    size: int,
    offsets: Mapping[str, int],
    *,
    alignment: int = 4,
) -> Records:
    """Return new records of which the union and the start of its member are declared.

    Args:
        assembly: What will hold the records.
        holder: The table with the union, ``EValue`` or ``Instruction``.
        type_field: Its field with the member's number.
        value_field: Its field with the member.
        number: Number of the member.
        member: Table name of the member.
        size: Bytes that the member takes.
        offsets: Offset of each field within the member.
        alignment: Alignment of a record.
    """
    holder_offsets = {type_field: _TYPE_OFFSET, value_field: _VALUE_OFFSET}
    records = assembly.records(Rank.PARENTS, alignment=alignment)
    records.table(assembly.skeleton.vtable(holder, _SIZE, holder_offsets))
    records.constant(number)
    records.constant(_TO_MEMBER)
    records.table(assembly.skeleton.vtable(member, size, offsets))
    return records
