"""The module by which a program calls a delegate."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module._executorch import joint_class
from lowerdeck.lowered_module.delegate.calling_convention import (
    CallingConvention,
    single_call_program,
)
from lowerdeck.lowered_module.program.prepared import PreparedProgram
from lowerdeck.torch_base import executorch_call_delegate

if TYPE_CHECKING:
    from lowerdeck.emitter import EmitConfig, EmittedProgram
    from lowerdeck.serializer import NamedDataStoreOutput, Program


class LoweredBackendModule(torch.nn.Module):
    """A compiled partition.

    Calling it runs the original graph in eager; the blob is for the device.

    torch's verifier identifies a delegate by this class's name and by ``backend_id``,
    ``processed_bytes``, ``compile_specs`` and ``original_module``.

    Args:
        edge_program: The partition with flat inputs and outputs; the module keeps it.
        backend_id: Name of the backend.
        compile_specs: The compile specs of the backend.
        named_data_store_output: The named data of the blob, if any.
        convention: The calling convention; by default flat positional arguments.

    Attributes:
        meta: Data for tools: ``"debug_handle_map"`` at least.
    """

    meta: dict[str, Any]

    @property  # type: ignore[misc]  # a read-only property
    def __class__(self) -> type[LoweredBackendModule]:
        """The class; if ExecuTorch is loaded, a subclass of both projects' classes."""
        return joint_class(type(self))

    def __init__(
        self,
        edge_program: ExportedProgram,
        backend_id: str,
        processed_bytes: bytes,
        compile_specs: list[Any],
        named_data_store_output: NamedDataStoreOutput | None = None,
        convention: CallingConvention | None = None,
    ) -> None:
        super().__init__()
        self._program = PreparedProgram.of(edge_program)
        self._convention = convention or CallingConvention.of(self._program)
        self._backend_id = backend_id
        self._processed_bytes = processed_bytes
        self._compile_specs = compile_specs
        self._named_data_store_output = named_data_store_output
        self.meta = {"debug_handle_map": None}

    @property
    def backend_id(self) -> str:
        """Name of the backend."""
        return self._backend_id

    @property
    def processed_bytes(self) -> bytes:
        """The blob, for the backend's runtime."""
        return self._processed_bytes

    @property
    def compile_specs(self) -> list[Any]:
        """The compile specs, for the backend and its runtime."""
        return self._compile_specs

    @property
    def original_module(self) -> ExportedProgram:
        """The partition as a program that takes and returns flat tuples.

        Deep copies of this module share its graph; treat it as read-only.
        """
        return self._program

    @property
    def named_data_store_output(self) -> NamedDataStoreOutput | None:
        """The named data of the blob, or None."""
        return self._named_data_store_output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original graph, in the calling convention of the program that was lowered.

        Args:
            *args: Positional arguments of the original program.
            **kwargs: Keyword arguments of the original program.

        Raises:
            SignatureError: The structure of the arguments differs from the program's.
        """
        flat = self._convention.flat(args, kwargs)
        return self._convention.result(executorch_call_delegate(self, *flat), flat)

    def program(
        self,
        emit_stacktrace: bool = False,
        memory_planning: EmitConfig | None = None,
    ) -> Program:
        """Return a whole program for the runtime that only calls this delegate.

        Its inputs and outputs are those of the program that was lowered, in the same structure.
        Tensors that the delegate owns are in its blob and named data.

        Args:
            emit_stacktrace: Whether to store the stack traces of the user's code.
            memory_planning: Settings of the emission, including the memory planner.
        """
        return self._emitted(memory_planning, stack_traces=emit_stacktrace).program

    def buffer(
        self,
        extract_delegate_segments: bool = False,
        segment_alignment: int = 128,
        constant_tensor_alignment: int | None = None,
        delegate_alignment: int | None = None,
        memory_planning: EmitConfig | None = None,
    ) -> bytes:
        """Return ``program()`` as the bytes of a ``.pte`` file.

        Args:
            extract_delegate_segments: Put the blob into a separate segment, which a runtime can
                free once the backend has read it.
            segment_alignment: Alignment of segments in bytes.
            constant_tensor_alignment: Alignment of constant tensors in bytes; 16 if None.
            delegate_alignment: Alignment of inline blobs in bytes; 16 if None.
            memory_planning: Settings of the emission, including the memory planner.
        """
        emitted = self._emitted(memory_planning)
        return emitted.to_bytes(
            extract_delegate_segments=extract_delegate_segments,
            segment_alignment=segment_alignment,
            constant_tensor_alignment=constant_tensor_alignment or 16,
            delegate_alignment=delegate_alignment or 16,
        )

    def _emitted(self, config: EmitConfig | None, *, stack_traces: bool = False) -> EmittedProgram:
        # Imported here: lowering itself never emits.
        from lowerdeck.emitter import EmitConfig, emit

        settings = config or EmitConfig()
        if stack_traces:
            settings = replace(settings, stack_traces=True)
        program = single_call_program(self, self._program, self._convention)
        return emit(program, config=settings)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        # pickle would use ``__class__``, which is another class if ExecuTorch is loaded.
        return _unfilled, (), dict(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> LoweredBackendModule:
        """Return a copy with separate state, maps and specs that shares all constants."""
        copied = LoweredBackendModule.__new__(LoweredBackendModule)
        memo[id(self)] = copied
        torch.nn.Module.__init__(copied)
        for name in ("_convention", "_backend_id", "_processed_bytes", "_named_data_store_output"):
            setattr(copied, name, getattr(self, name))
        copied._program = self._program.with_own_state()
        copied._compile_specs = copy.deepcopy(self._compile_specs, memo)
        copied.meta = copy.deepcopy(self.meta, memo)
        return copied


def _unfilled() -> LoweredBackendModule:
    """Return an empty delegate for unpickling; its ``__class__`` is determined again."""
    return LoweredBackendModule.__new__(LoweredBackendModule)
