"""Checks that a file is safe to run, beyond the checks of the runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from lowerdeck.serializer.errors import (
    ContentError,
    FormatError,
    IndexRangeError,
    LimitError,
    MissingFieldError,
    TruncatedError,
)
from lowerdeck.serializer.flatbuffer.limits import (
    MAX_OPERATOR_NAME,
    MAX_PLANNED_MEMORY,
    MAX_TABLES,
)
from lowerdeck.serializer.flatbuffer.storage import resident_view, storage_size
from lowerdeck.serializer.kernels.limits import is_constant
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.decode import PlanTable
from lowerdeck.serializer.pte.read import PteFile
from lowerdeck.serializer.pte.table_count import count_tables
from lowerdeck.serializer.pte.write import MIN_FILE_SIZE
from lowerdeck.serializer.verify.hazards import Hazard, hazards_of
from lowerdeck.serializer.verify.verify_chains import ChainVerifier
from lowerdeck.serializer.verify.verify_values import StoredData, ValueVerifier
from lowerdeck.serializer.xnnpack.graph import XnnGraph
from lowerdeck.serializer.xnnpack.payload import BACKEND, decode_payload
from lowerdeck.serializer.xnnpack.verify import verify_payload

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Kinds of values that can be inputs or outputs of a method.
_PASSED = (
    schema.Null,
    schema.Int,
    schema.Bool,
    schema.Double,
    schema.Tensor,
    schema.String,
)


def verify_pte(
    data: ReadableBuffer,
    *,
    max_tables: int = MAX_TABLES,
    on_hazard: Callable[[Hazard], object] | None = None,
) -> schema.Program:
    """Return the program of a file after checking that it is safe to load and run.

    Beyond the checks of reading, indices, counts, sizes and orders are checked, including cases in
    which the official runtime crashes or silently computes wrong values. XNNPACK payloads are
    checked as well; other delegates are opaque. Values computed at run time are not checked.

    Args:
        max_tables: Maximum number of tables; the runtime's default limit is a million.
        on_hazard: Called with each delegate of a valid file that needs data of a ``.ptd`` file or
            a newer release of ExecuTorch, or that 1.4.1 may fail to load.

    Returns:
        The program, as :func:`deserialize_pte` returns it.

    Raises:
        FormatError: The file is malformed, or not safe to run; the message says where and why.

    Example:
        >>> from lowerdeck.serializer import Program, serialize_pte
        >>> verify_pte(serialize_pte(Program())).version
        0
    """
    file = PteFile(data, strict=True)
    if len(file.data) < MIN_FILE_SIZE:
        raise TruncatedError(
            f"found {len(file.data)} bytes, expected {MIN_FILE_SIZE}, which the runtime reads",
            field="file",
        )
    program = file.program()
    return ProgramVerifier(file, program, max_tables, on_hazard).verify()


class ProgramVerifier:
    """Checks one program against the file that it was read from."""

    def __init__(
        self,
        file: PteFile,
        program: schema.Program,
        max_tables: int,
        on_hazard: Callable[[Hazard], object] | None = None,
    ) -> None:
        self._on_hazard = on_hazard
        self._file = file
        self._program = program
        self._max_tables = max_tables
        self._decoder = file.decoder
        self._payloads: dict[int, XnnGraph] = {}
        self._reported: set[int] = set()
        self._named = {entry.key: storage_size(entry.data) for entry in program.named_data}

    def verify(self) -> schema.Program:
        """Check the file and return the program.

        Raises:
            FormatError: The file is malformed or not safe to run.
        """
        file, program = self._file, self._program
        if program.version:
            raise ContentError(
                f"found {program.version}, expected 0; newer runtimes reject other versions",
                field="Program.version",
            )
        if not self._decoder.execution_plan:
            raise MissingFieldError("found none", field="Program.execution_plan")
        tables = count_tables(program, segments=len(file.segments))
        if tables > self._max_tables:
            raise LimitError(
                f"found {tables} tables, expected at most {self._max_tables}, the limit of the "
                "runtime's verifier; split the program, or load it with Verification.Minimal",
                field="Program",
            )
        constants, mutable = self._constants(), self._mutable()
        for table, plan in zip(file.plan_tables, program.execution_plan, strict=True):
            self._verify_plan(table, plan, constants, mutable)
        return program

    def _verify_plan(
        self,
        table: PlanTable,
        plan: schema.ExecutionPlan,
        constants: StoredData,
        mutable: StoredData,
    ) -> None:
        for name in (
            *("values", "inputs", "outputs", "chains", "delegates"),
            "non_const_buffer_sizes",
        ):
            if not getattr(table, name):
                raise MissingFieldError(
                    "found none, expected a vector, even if it is empty",
                    field=f"method {plan.name!r}.{name}",
                    offset=table.position,
                )
        _verify_memory(table, plan)
        _verify_operators(table, plan)
        _verify_arguments(table, plan)
        reader = self._decoder.reader
        ValueVerifier(
            plan, constants, mutable, lambda index: reader.entry(table.values, index)
        ).verify()

        def step_position(chain: int, step: int) -> int:
            chain_table = reader.entry(table.chains, chain)
            return reader.entry(reader.fields("Chain", chain_table)[2], step)

        payloads = [self._payload(plan, number) for number in range(len(plan.delegates))]
        ChainVerifier(plan, step_position, payloads).verify()
        for number, payload in enumerate(payloads):
            index = plan.delegates[number].processed.index
            # Delegates may share a payload.
            if payload is None or index in self._reported or self._on_hazard is None:
                continue
            self._reported.add(index)
            field = f"method {plan.name!r}.delegates[{number}]"
            position = reader.entry(table.delegates, number)
            for hazard in hazards_of(payload, self._named, field, position):
                self._on_hazard(hazard)

    def _payload(self, plan: schema.ExecutionPlan, number: int) -> XnnGraph | None:
        """Return a delegate's payload, verified once for all methods; None for other backends."""
        delegate = plan.delegates[number]
        blobs = self._program.backend_delegate_data
        index = delegate.processed.index
        if delegate.id != BACKEND or not 0 <= index < len(blobs):
            return None
        if index not in self._payloads:
            try:
                graph = decode_payload(resident_view(blobs[index].data))
                verify_payload(graph, self._named)
            except FormatError as error:
                field = f"method {plan.name!r}.delegates[{number}]"
                raise ContentError(str(error), field=field) from error
            self._payloads[index] = graph
        return self._payloads[index]

    def _constants(self) -> StoredData:
        offsets = self._file.constant_segment
        if offsets is not None:
            field = "Program.constant_segment"
            return self._stored(offsets, field, aligned=True, needed=True)
        inline = self._decoder.constant_buffer or [(0, memoryview(b""))]
        starts = [start for start, _ in inline]
        return StoredData(starts, [start + len(view) for start, view in inline], aligned=True)

    def _mutable(self) -> StoredData:
        tables = self._file.mutable_data_segments
        if not tables:
            return StoredData((0,), (0,), aligned=False)
        return self._stored(
            tables[0], "Program.mutable_data_segments[0]", aligned=False, needed=False
        )

    def _stored(
        self, table: schema.SubsegmentOffsets, field: str, *, aligned: bool, needed: bool
    ) -> StoredData:
        segments = self._file.segments
        if table.segment_index >= len(segments):
            raise IndexRangeError(
                f"found segment {table.segment_index}, expected one of {len(segments)}",
                field=f"{field}.segment_index",
            )
        segment = segments[table.segment_index]
        if needed and len(table.offsets) > 1 and not segment.size:
            raise ContentError(
                "found an empty constant segment, which the runtime treats as missing; rewrite "
                "the file with this package, which makes it one byte",
                field=field,
            )
        header = self._file.header
        start = segment.offset + (header.segment_base_offset if header else 0)
        starts = [start + offset for offset in table.offsets]
        return StoredData(starts, [start + segment.size] * len(starts), aligned)


def _verify_memory(table: PlanTable, plan: schema.ExecutionPlan) -> None:
    sizes = plan.non_const_buffer_sizes
    name = "non_const_buffer_sizes"
    if not sizes or sizes[0]:
        _refuse(table, name, f"found {sizes[:1]}, expected the reserved entry 0 to be 0")
    if any(size < 0 for size in sizes):
        _refuse(table, name, f"found {min(sizes)}, expected none below 0")
    if sum(sizes) > MAX_PLANNED_MEMORY:
        _refuse(
            table,
            name,
            f"found {sum(sizes)} bytes, expected at most {MAX_PLANNED_MEMORY}",
            LimitError,
        )
    # The runtime allocates all of it before it runs, so implausible sizes are rejected.
    used = [0] * len(sizes)
    for value in plan.values:
        tensor = value.val
        allocation = tensor.allocation_info if isinstance(tensor, schema.Tensor) else None
        if isinstance(tensor, schema.Tensor) and allocation and allocation.memory_id < len(used):
            end = allocation.memory_offset + tensor.nbytes
            used[allocation.memory_id] = max(used[allocation.memory_id], end)
    for index, (size, end) in enumerate(zip(sizes, used, strict=True)):
        if size > 2 * end + _SPARE_MEMORY:
            _refuse(
                table,
                f"{name}[{index}]",
                f"found {size} bytes, expected at most 16 MiB above twice the {end} in use",
                LimitError,
            )
    for device in plan.non_const_buffer_device or ():
        if not 0 <= device.buffer_idx < len(sizes):
            _refuse(
                table,
                "non_const_buffer_device",
                f"found buffer {device.buffer_idx}, expected one of {len(sizes)}",
                IndexRangeError,
            )


_SPARE_MEMORY = 1 << 24  # planned bytes allowed beyond twice the used ones


def _verify_operators(table: PlanTable, plan: schema.ExecutionPlan) -> None:
    if not plan.chains:
        _refuse(table, "chains", "found none, expected at least one chain")
    if not table.operators and any(
        isinstance(step.instr_args, schema.KernelCall)
        for chain in plan.chains
        for step in chain.instructions
    ):
        _refuse(table, "operators", "found none, expected the operators that are called")
    for index, operator in enumerate(plan.operators):
        name = operator.full_name
        length = len(name.encode())
        if not operator.name or length > MAX_OPERATOR_NAME or "\0" in name:
            _refuse(
                table,
                f"operators[{index}]",
                f"found the name {name[:120]!r} of {length} bytes, expected 1 to "
                f"{MAX_OPERATOR_NAME} without NUL: the runtime copies it into 100 bytes",
            )


def _verify_arguments(table: PlanTable, plan: schema.ExecutionPlan) -> None:
    for name, indices in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        for index in indices:
            if not 0 <= index < len(plan.values):
                reason = f"found value {index}, expected one of {len(plan.values)}"
                _refuse(table, name, reason, IndexRangeError)
            value = plan.values[index].val
            if not isinstance(value, _PASSED):
                kind = type(value).__name__
                _refuse(
                    table,
                    name,
                    f"found value {index}, a {kind}, which cannot be an input or output",
                )
            if name == "inputs" and is_constant(value):
                reason = f"found the constant {index}, expected a writable tensor"
                _refuse(table, name, reason)


def _refuse(
    table: PlanTable, field: str, reason: str, kind: type[FormatError] = ContentError
) -> NoReturn:
    raise kind(reason, field=f"method {table.name!r}.{field}", offset=table.position)
