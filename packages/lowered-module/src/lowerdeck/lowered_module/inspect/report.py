"""What a person wants to see after lowering a model, in figures and in lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lowerdeck.emitter import EmittedProgram
from lowerdeck.lowered_module.inspect.accuracy import OutputAccuracy
from lowerdeck.lowered_module.inspect.float_weights import FloatWeight
from lowerdeck.lowered_module.inspect.summary import DelegationSummary, Remark
from lowerdeck.serializer import FileRange, Storage


@dataclass(frozen=True, slots=True)
class LoweringFigures:
    """What lowering a model came to.

    Attributes:
        nodes: Computing nodes before lowering.
        delegated_nodes: How many of them went to backends.
        partitions: Delegates by backend.
        file: Where the file lies.
        file_bytes: Its size.
        contents: Bytes in the file by what fills them.
        planned_bytes: Memory that the plan reserves, over all methods.
        seconds: Wall time of each stage.
        difference: Largest difference from eager, None where it was not measured.
        not_compared: Why it was not measured.
        accuracy: The difference of each output from eager's, and of each buffer in the file.
        is_quantized: Whether eager is the model before it was quantised.
        remarks: What partitioners said of nodes that they gave to backends.
        mode: How it was quantised.
        float_weights: The weights that stay float although it was quantised, the largest first.
        weight_bytes: Bytes of all weights of the model in float.
        calibrated: With how many samples it was calibrated; None without calibration.
        trials: What was measured to choose backends, a line each.
    """

    nodes: int
    delegated_nodes: int
    partitions: Mapping[str, int]
    file: Path
    file_bytes: int
    contents: Mapping[str, int]
    planned_bytes: int
    seconds: Mapping[str, float]
    difference: float | None
    not_compared: str = ""
    accuracy: tuple[OutputAccuracy, ...] = ()
    is_quantized: bool = False
    mode: str = ""
    float_weights: tuple[FloatWeight, ...] = ()
    weight_bytes: int = 0
    calibrated: int | None = None
    remarks: tuple[Remark, ...] = ()
    trials: tuple[str, ...] = ()


def figures_of(
    emitted: EmittedProgram,
    summary: DelegationSummary,
    file: Path,
    seconds: Mapping[str, float],
    difference: float | None,
    not_compared: str = "",
) -> LoweringFigures:
    """Return the figures of one lowering.

    Args:
        emitted: What was emitted.
        summary: What lowering did.
        file: Where it was written.
        seconds: Wall time of each stage.
        difference: Largest difference from eager, if measured.
        not_compared: Why it was not measured.
    """
    delegated = sum(summary.delegated.values())
    return LoweringFigures(
        nodes=delegated + sum(summary.left.values()),
        delegated_nodes=delegated,
        partitions=summary.delegates,
        file=file,
        file_bytes=file.stat().st_size,
        contents=_contents(emitted, file.stat().st_size),
        planned_bytes=sum(
            sum(plan.non_const_buffer_sizes) for plan in emitted.program.execution_plan
        ),
        seconds=seconds,
        difference=difference,
        not_compared=not_compared,
        remarks=summary.remarks,
    )


def report_lines(figures: LoweringFigures) -> Iterator[str]:
    """Yield the lines that ``lowerdeck lower`` prints.

    Args:
        figures: What lowering came to.
    """
    yield from figures.trials
    share = figures.delegated_nodes / figures.nodes if figures.nodes else 0.0
    per_backend = ", ".join(f"{count} to {name}" for name, count in figures.partitions.items())
    yield f"nodes          {figures.nodes}"
    yield f"partitions     {sum(figures.partitions.values())}" + (
        f" ({per_backend})" if per_backend else ""
    )
    yield f"delegated      {figures.delegated_nodes} nodes, {share:.0%}"
    yield from map(str, figures.remarks)
    yield f"file size      {_size(figures.file_bytes)}"
    for name, count in sorted(figures.contents.items(), key=lambda item: -item[1]):
        if count:
            # A device that was written to has no size.
            part = f" {count / figures.file_bytes:>5.0%}" if figures.file_bytes else ""
            yield f"  {name:<20} {_size(count):>12}{part}"
    yield f"planned memory {_size(figures.planned_bytes)}"
    yield "time           " + ", ".join(
        f"{stage} {spent:.2f} s" for stage, spent in figures.seconds.items()
    )
    if figures.difference is None:
        yield f"from eager     not compared: {figures.not_compared}"
    else:
        yield f"from eager     differs by at most {figures.difference:.3g}"
    yield from _quantization_lines(figures)
    yield f"file           {figures.file.resolve()}"


def _quantization_lines(figures: LoweringFigures) -> Iterator[str]:
    if figures.calibrated is not None:
        told = (
            f"with {figures.calibrated} samples"
            if figures.calibrated
            else ("with the example inputs alone; --calibrate MODULE:FACTORY names better ones")
        )
        yield f"calibrated     {told}"
    left = sum(one.nbytes for one in figures.float_weights)
    for weight in figures.float_weights:
        yield f"stays float    {weight.name}: {_size(weight.nbytes)}: {weight.why}"
    if 2 * left > figures.weight_bytes:
        yield (
            f"warning        --quantize {figures.mode} leaves {_size(left)} of "
            f"{_size(figures.weight_bytes)} of weights in float"
        )
    for one in figures.accuracy if figures.is_quantized else ():
        yield f"from float     {one.name}: {one}"


def _contents(emitted: EmittedProgram, file_bytes: int) -> dict[str, int]:
    program = emitted.program
    named = emitted.named_data.get_named_data_store_output()
    parts = {
        "constants": sum(_bytes(buffer.storage) for buffer in program.constant_buffer),
        "delegate blobs": sum(_bytes(blob.data) for blob in program.backend_delegate_data),
        "named data": sum(_bytes(blob) for blob in named.buffers),
        "initial state": sum(_bytes(buffer.storage) for buffer in program.mutable_data or ()),
    }
    parts["program and padding"] = max(0, file_bytes - sum(parts.values()))
    return parts


def _bytes(storage: Storage) -> int:
    return 0 if isinstance(storage, FileRange) else memoryview(storage).nbytes


def _size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
