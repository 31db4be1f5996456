"""Hand partitions to their backends and make delegates of what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.export import ExportedProgram

from lowerdeck.lowered_module._torch_private import set_program_parts
from lowerdeck.lowered_module.calling_convention import CallingConvention
from lowerdeck.lowered_module.copies import backend_copy
from lowerdeck.lowered_module.cut import Cut
from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.module import LoweredBackendModule
from lowerdeck.lowered_module.prepared import own_mutable_state
from lowerdeck.lowered_module.registry import find_backend

Progress = Callable[[int, int, str], None]
"""Called with the number of partitions done, the number of all, and the last one's place."""


def make_delegate(
    program: ExportedProgram,
    backend_id: str,
    compile_specs: list[Any],
    result: Any,
    place: str,
    convention: CallingConvention | None = None,
) -> LoweredBackendModule:
    """Return the delegate of one partition.

    Args:
        program: The partition.
        backend_id: Its backend.
        compile_specs: What the backend was told.
        result: What the backend returned.
        place: The partition, in words for errors.
        convention: How to call it, where that is not with flat positional arguments.

    Raises:
        PreprocessError: ``result`` is no result.
    """
    blob = getattr(result, "processed_bytes", None)
    if isinstance(blob, bytearray | memoryview):
        blob = bytes(blob)
    if not isinstance(blob, bytes):
        raise PreprocessError(
            f"backend {backend_id!r} returned {_kind(result)} for partition {place}, whose "
            f"processed_bytes is {_kind(blob)}: return a PreprocessResult with bytes"
        )
    # What the delegate changes is its own from now on: the caller's program keeps its values.
    set_program_parts(
        program,
        state_dict=own_mutable_state(program, program.state_dict),
        constants=own_mutable_state(program, program.constants),
    )
    delegate = LoweredBackendModule(
        program,
        backend_id,
        blob,
        compile_specs,
        getattr(result, "data_store_output", None),
        convention,
    )
    delegate.meta["debug_handle_map"] = getattr(result, "debug_handle_map", None)
    for name in ("delegate_info_meta", "_delegate_info_meta"):
        if getattr(result, name, None) is not None:
            delegate.meta["_delegate_info_meta"] = getattr(result, name)
    return delegate


def preprocess_each(cuts: Sequence[Cut], progress: Progress) -> Iterator[LoweredBackendModule]:
    """Yield the delegate of each partition, in order.

    Raises:
        BackendNotFoundError: A partition goes to no known backend.
        PreprocessError: A backend raised or returned no result.
    """
    backends = {name: find_backend(name) for name in dict.fromkeys(c.backend_id for c in cuts)}
    for number, cut in enumerate(cuts):
        program = cut.part.program
        try:
            result = backends[cut.backend_id].preprocess(backend_copy(program), cut.compile_specs)
        except Exception as error:
            raise failure(cut, error) from error
        yield make_delegate(program, cut.backend_id, cut.compile_specs, result, cut.place)
        progress(number + 1, len(cuts), cut.place)


def failure(cut: Cut, error: BaseException) -> PreprocessError:
    """Return what to raise when the backend of ``cut`` raised ``error``."""
    lines = source_lines(cut.part.program)
    return PreprocessError(
        f"backend {cut.backend_id!r} failed on partition {cut.place} with "
        f"{type(error).__name__}: {error}"
        + (f"\nThe partition comes from\n{lines}" if lines else "")
    )


def source_lines(program: ExportedProgram, limit: int = 5) -> str:
    """Return the last lines of source of the first nodes of ``program``, each once."""
    found: dict[str, None] = {}
    for node in program.graph.nodes:
        trace = (node.meta.get("stack_trace") or "").strip()
        if node.op == "call_function" and trace and len(found) < limit:
            found["\n".join(trace.splitlines()[-2:])] = None
    return "\n".join(found)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
