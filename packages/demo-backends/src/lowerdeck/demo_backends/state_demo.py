"""Demo of a delegate that owns state: the key-value cache of an attention.

The program must be functional (``exported.run_decompositions({})``), so that its signature says
which outputs are new values of which buffers. The partition then owns those buffers: no call
passes them in or out, the file has their first values, and the runtime half keeps them between
calls, one state for each handle, as it was where a call fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.fx import Node

from lowerdeck.demo_backends.errors import BlobError, DelegateRunError
from lowerdeck.demo_backends.text_backend import Kernels, TextBackend, TextRuntime, is_positional
from lowerdeck.demo_backends.text_format import TextProgram
from lowerdeck.lowered_module import DeclarativePartitioner, PartitionView, visits
from lowerdeck.serializer import CompileSpec as StoredSpec

KERNELS: Kernels = {
    "aten.add.Tensor": torch.add,
    "aten.index_copy.default": torch.index_copy,
    "aten.matmul.default": torch.matmul,
    "aten.softmax.int": torch.softmax,
    "aten.t.default": torch.t,
}


class BackendWithStateDemo(TextBackend):
    """Compiles attention with a cache to a text that says what its state is."""

    kernels = KERNELS
    owns_state = True

    @visits(*KERNELS, when=is_positional)
    def any_of_them(self, part: PartitionView, node: Node) -> None:
        """Add one step."""
        self.add_call(part, node)


class StateDemoPartitioner(DeclarativePartitioner):
    """Gives attention with a cache to the backend, and the cache with it."""

    def __init__(self) -> None:
        super().__init__(BackendWithStateDemo)


@dataclass(slots=True)
class StatefulProgram:
    """A program and its state.

    Attributes:
        program: Takes the state before the inputs, returns the new state before the outputs.
        state: What it is now; the handle's own.
    """

    program: TextProgram
    state: list[torch.Tensor]


class StateDemoRuntime(TextRuntime):
    """Executes the texts of ``BackendWithStateDemo`` and keeps their state between calls."""

    backend: ClassVar[type[TextBackend]] = BackendWithStateDemo

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[StoredSpec],
        named_data: Mapping[str, memoryview],
    ) -> StatefulProgram:
        """Return the program of a blob with its first state; ``BlobError`` where it is damaged."""
        program: TextProgram = super().init(blob, compile_specs, named_data)
        first = [item.clone() for item in program.inputs if isinstance(item, torch.Tensor)]
        if any(isinstance(item, str) for item in program.inputs[: len(first)]):
            raise BlobError("an input comes before a state: the state comes first")
        if len(first) > len(program.outputs):
            raise BlobError(f"{len(first)} states, but {len(program.outputs)} outputs")
        return StatefulProgram(program, first)

    def input_count(self, handle: StatefulProgram) -> int:
        """Return how many inputs the caller gives."""
        return len(handle.program.inputs) - len(handle.state)

    def execute_logged(
        self,
        handle: StatefulProgram,
        inputs: Sequence[torch.Tensor],
        log: Callable[..., None],
    ) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``, report every step, and keep the new state.

        Args:
            inputs: The inputs in order.
            log: Called with each step's identifier, start, end and outputs.

        Returns:
            The outputs in order.

        Raises:
            DelegateInputError: The number of inputs or a dtype does not match.
            DelegateRunError: A step cannot be computed; the state is as it was.
        """
        results = super().execute_logged(handle.program, [*handle.state, *inputs], log)
        count = len(handle.state)
        for old, new in zip(handle.state, results[:count], strict=True):
            if old.shape != new.shape or old.dtype != new.dtype:
                raise DelegateRunError(
                    f"state of {old.dtype}{list(old.shape)} became {new.dtype}{list(new.shape)}"
                )
        handle.state[:] = results[:count]
        return results[count:]


class KvCacheAttention(nn.Module):
    """Attention of one new token to all tokens so far, whose keys and values it keeps.

    Args:
        length: Number of tokens that the cache holds.
        width: Width of a token.
    """

    def __init__(self, length: int = 8, width: int = 4) -> None:
        super().__init__()
        self.keys: nn.Buffer = nn.Buffer(torch.zeros(length, width))
        self.values: nn.Buffer = nn.Buffer(torch.zeros(length, width))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Return the attended value of shape ``[1, width]``, and keep key and value."""
        self.keys.index_copy_(0, position, key)
        self.values.index_copy_(0, position, value)
        weights = torch.softmax(query @ self.keys.t() + mask, -1)
        return weights @ self.values
