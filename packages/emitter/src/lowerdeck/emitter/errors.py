"""The errors that this package raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class EmitterError(Exception):
    """Base class of the errors of ``lowerdeck.emitter``.

    Attributes:
        exit_status: Exit status of a ``lowerdeck`` command that raises it: 3 if the program cannot
            be emitted, 4 if something is missing on this machine or in the runtime.
    """

    exit_status: int = 3


@dataclass(frozen=True, slots=True)
class MissingKernel:
    """An operator without a kernel.

    Attributes:
        operator: Name of the operator in the graph, such as ``"aten.sort.default"``.
        reason: Why no kernel fits.
        sources: Node name and source line of its first uses, then the number of the others.
    """

    operator: str
    reason: str
    sources: tuple[str, ...]


class MissingKernelError(EmitterError):
    """The program uses operators that the target runtime has no kernel for.

    Attributes:
        missing: The operators without a kernel, in order of first use.
    """

    exit_status: int = 4

    def __init__(self, missing: Sequence[MissingKernel], version: str) -> None:
        self.missing: tuple[MissingKernel, ...] = tuple(missing)
        lines = [
            f"{len(self.missing)} operator(s) have no kernel in the ExecuTorch runtime {version}:"
        ]
        for item in self.missing:
            lines.append(f"  {item.operator}: {item.reason}")
            lines += [f"    at {source}" for source in item.sources]
        lines.append(
            "For each: rewrite the model or add a decomposition "
            "(EmitConfig.decompositions), give the nodes to a delegate before emitting, or, if "
            "the target registers its own kernel, name it in custom_kernels of the config."
        )
        super().__init__("\n".join(lines))


class DecompositionError(EmitterError):
    """torch cannot decompose the program, or a decomposition specializes a dynamic size."""


class UnsupportedError(EmitterError):
    """The file format or the runtime does not support a part of the program."""


class UnboundedSizeError(EmitterError):
    """A size has no upper bound, so no memory can be planned for it."""


class InvalidDelegateError(EmitterError):
    """A lowered module does not follow the delegate protocol."""


class MemoryPlanError(EmitterError):
    """A memory plan has a wrong number of places, an invalid place, or overlapping storages."""
