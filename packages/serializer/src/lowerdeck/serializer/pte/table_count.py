"""Number of tables that the runtime's verifier visits."""

from __future__ import annotations

from lowerdeck.serializer.pte import schema


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
