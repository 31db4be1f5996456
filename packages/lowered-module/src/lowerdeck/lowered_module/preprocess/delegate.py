"""Make a delegate of what a backend returned, or say what is wrong with it."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram

from lowerdeck.lowered_module.delegate import CallingConvention, LoweredBackendModule
from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.partition import Cut
from lowerdeck.lowered_module.program.prepared import give_own_state
from lowerdeck.torch_base import source_frame


def make_delegate(
    program: ExportedProgram,
    backend_id: str,
    compile_specs: list[Any],
    result: Any,
    convention: CallingConvention | None = None,
) -> LoweredBackendModule:
    """Return the delegate of one partition.

    Args:
        program: The partition.
        backend_id: Its backend.
        compile_specs: What the backend was told.
        result: What the backend returned, checked by ``check_result``.
        convention: How to call it, where that is not with flat positional arguments.
    """
    # What the delegate changes is its own from now on: the caller's program keeps its values.
    give_own_state(program)
    delegate = LoweredBackendModule(
        program,
        backend_id,
        bytes(result.processed_bytes),
        compile_specs,
        getattr(result, "data_store_output", None),
        convention,
    )
    delegate.meta["debug_handle_map"] = getattr(result, "debug_handle_map", None)
    for name in ("delegate_info_meta", "_delegate_info_meta"):
        if getattr(result, name, None) is not None:
            delegate.meta["_delegate_info_meta"] = getattr(result, name)
    return delegate


def check_result(result: Any, backend_id: str, label: str) -> Any:
    """Return ``result`` if a delegate can be made of it.

    Args:
        result: What a backend returned.
        backend_id: The backend.
        label: The partition, in words.

    Raises:
        PreprocessError: It has no bytes.
    """
    blob = getattr(result, "processed_bytes", None)
    if not isinstance(blob, bytes | bytearray | memoryview):
        raise PreprocessError(
            f"backend {backend_id!r} returned {_kind(result)} for partition {label}, whose "
            f"processed_bytes is {_kind(blob)}: return a PreprocessResult with bytes"
        )
    return result


def failure(cut: Cut, error: BaseException) -> PreprocessError:
    """Return what to raise when the backend of ``cut`` raised ``error``.

    Args:
        cut: The partition.
        error: What the backend raised.
    """
    said = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    lines = source_lines(cut.part.program)
    origin = f"\nThe partition comes from\n{lines}" if lines else ""
    return PreprocessError(
        f"backend {cut.backend_id!r} failed on partition {cut.label} with {said}{origin}"
    )


def source_lines(program: ExportedProgram, limit: int = 5) -> str:
    """Return the lines of source that the first nodes of ``program`` come from, each once.

    Args:
        program: A partition.
        limit: How many lines to name.
    """
    found: dict[str, None] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or len(found) == limit:
            continue
        frame = source_frame(node)
        if frame:
            found["\n    ".join(filter(None, (f"  {frame.location}", frame.code)))] = None
    return "\n".join(found)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
