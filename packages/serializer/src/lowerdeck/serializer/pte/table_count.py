"""Number of tables that the runtime's verifier visits."""

from __future__ import annotations

import warnings

from lowerdeck.serializer.errors import TableLimitWarning
from lowerdeck.serializer.flatbuffer.limits import MAX_TABLES
from lowerdeck.serializer.pte import schema


def warn_of_tables(program: schema.Program, *, segments: int) -> None:
    """Warn if a program has more tables than the runtime's verifier accepts.

    Args:
        segments: Number of segments of the file.
    """
    plans = program.execution_plan
    steps = sum(len(chain.instructions) for plan in plans for chain in plan.chains)
    # A value has at most 4 tables and an instruction 2: small programs need no count.
    if 4 * sum(len(plan.values) for plan in plans) + 2 * steps < MAX_TABLES // 2:
        return
    tables = count_tables(program, segments=segments)
    if tables > MAX_TABLES:
        warnings.warn(
            f"the program has {tables} tables, but the runtime's verifier accepts at most "
            f"{MAX_TABLES}; split the program, or load it with Verification.Minimal",
            TableLimitWarning,
            stacklevel=4,
        )


def count_tables(program: schema.Program, *, segments: int = 0) -> int:
    """Return the number of tables that the runtime's verifier visits.

    A shared table counts once per reference.

    Args:
        segments: Number of segments of the file.
    """
    offsets = 2 if len(program.mutable_data) > 1 else 1
    data = len(program.backend_delegate_data) + len(program.named_data)
    return 1 + segments + offsets + data + sum(map(_count_plan, program.execution_plan))


def _count_plan(plan: schema.ExecutionPlan) -> int:
    tables = 1 + (plan.container_meta_type is not None) + 2 * len(plan.values)
    for value in plan.values:
        tensor = value.val
        if type(tensor) is schema.Tensor:
            tables += (tensor.allocation_info is not None) + (tensor.extra_tensor_info is not None)
    for chain in plan.chains:
        tables += 1 + 2 * len(chain.instructions)
        tables += sum(1 + len(trace.items) for trace in chain.stacktrace or ())
    tables += len(plan.operators) + len(plan.non_const_buffer_device or ())
    return tables + sum(2 + len(delegate.compile_specs) for delegate in plan.delegates)
