"""Lowering reports for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lowerdeck.emitter import EmittedProgram
from lowerdeck.lowered_module.inspect.accuracy import OutputAccuracy
from lowerdeck.lowered_module.inspect.float_weights import FloatWeight
from lowerdeck.lowered_module.inspect.summary import DelegationSummary, size_text
from lowerdeck.serializer import ExecutionPlan, KernelCall, Tensor

_MOST_CAUSES = 8
"""Number of reasons that are printed."""


def report_lines(
    emitted: EmittedProgram,
    summary: DelegationSummary,
    file: Path,
    seconds: Mapping[str, float],
) -> Iterator[str]:
    """Yield lines about the result of lowering and the contents of the file."""
    delegated, left = sum(summary.delegated.values()), sum(summary.left.values())
    per_backend = ", ".join(f"{count} to {name}" for name, count in summary.delegates.items())
    yield f"nodes          {delegated + left}"
    yield f"partitions     {sum(summary.delegates.values())}" + (
        f" ({per_backend})" if per_backend else ""
    )
    yield f"delegated      {delegated} nodes, {summary.share:.0%}"
    for number, cause in enumerate(summary.root_causes[:_MOST_CAUSES]):
        yield f"{'' if number else 'left':<15}{cause}"
    if more := summary.root_causes[_MOST_CAUSES:]:
        yield f"{'':<15}and {len(more)} more: delegation().root_causes in Python"
    yield from map(str, summary.remarks)
    yield f"file size      {size_text(file.stat().st_size)}"
    plans = emitted.program.execution_plan
    yield f"planned memory {size_text(sum(sum(plan.non_const_buffer_sizes) for plan in plans))}"
    yield from _largest_tensor(plans)
    yield "time           " + ", ".join(
        f"{output} {spent:.2f} s" for output, spent in seconds.items()
    )


def accuracy_lines(
    accuracy: Sequence[OutputAccuracy], compared: str | Sequence[str], *, quantized: bool
) -> Iterator[str]:
    """Yield lines about differences from the model, by output if the program is quantised.

    Args:
        accuracy: The largest difference of each output from the model's, over all calls.
        compared: The compared input sizes, or why the accuracy is unknown.
    """
    if isinstance(compared, str):
        yield f"{'from float' if quantized else 'from eager'}     not compared: {compared}"
        return
    if quantized:
        for output in accuracy:
            yield f"from float     {output.name}: {output}"
    else:
        largest = max((output.largest for output in accuracy), default=0.0)
        relative = max((output.relative for output in accuracy), default=0.0)
        yield f"from eager     differs by at most {largest:.3g} (relative {relative:.2g})"
    if len(compared) > 1:
        yield f"compared at    input sizes {'; '.join(compared)}"


def quantization_lines(
    mode: str,
    float_weights: Sequence[FloatWeight],
    weight_bytes: int,
    samples: int | None,
) -> Iterator[str]:
    """Yield lines about the calibration and the weights that stay float.

    Args:
        float_weights: The weights that stay float, the largest first.
        weight_bytes: Bytes of all weights of the model in float.
        samples: Number of calibration samples; None without calibration.
    """
    if samples is not None:
        calibration = f"with {samples} samples" if samples else "with only the example inputs; "
        yield f"calibrated     {calibration}" + (
            "" if samples else "--calibrate MODULE:FACTORY adds samples"
        )
    for weight in float_weights:
        yield f"stays float    {weight.name}: {size_text(weight.nbytes)}: {weight.why}"
    left = sum(output.nbytes for output in float_weights)
    if 2 * left > weight_bytes:
        yield (
            f"warning        --quantize {mode} leaves {size_text(left)} of "
            f"{size_text(weight_bytes)} of weights in float"
        )


def _largest_tensor(plans: Sequence[ExecutionPlan]) -> Iterator[str]:
    """Yield a line about the largest planned tensor."""
    planned = [
        (value.val, index, plan)
        for plan in plans
        for index, value in enumerate(plan.values)
        if isinstance(value.val, Tensor) and value.val.allocation_info is not None
    ]
    if not planned:
        return
    tensor, index, plan = max(planned, key=lambda entry: entry[0].nbytes)
    operators = [
        plan.operators[call.op_index].name
        for chain in plan.chains
        for call in (instruction.instr_args for instruction in chain.instructions)
        if isinstance(call, KernelCall) and index in call.args
    ]
    where = f", first in {operators[0]}" if operators else ""
    bounds = "at most " if tensor.shape_dynamism else ""
    shape = f"{bounds}{list(tensor.sizes)} {tensor.scalar_type.name.lower()}"
    yield f"  {'largest tensor':<20} {size_text(tensor.nbytes):>12} {shape}{where}"
