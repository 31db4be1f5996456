"""Demo of a delegate that owns state: the key-value cache of an attention.

The program must be functional (``exported.run_decompositions({})``), so that its signature lists
the new values of the buffers that it mutates. The partition owns these buffers: they are neither
inputs nor outputs of a call. The file contains their initial values, and each handle of the
runtime has a separate copy, which a failed call leaves unchanged.
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
    """Compiles attention with a key-value cache to a text format that includes the cache."""

    kernels = KERNELS
    owns_state = True

    @visits(*KERNELS, when=is_positional)
    def call(self, part: PartitionView, node: Node) -> None:
        """Add one step for a call."""
        self.add_call(part, node)


class StateDemoPartitioner(DeclarativePartitioner):
    """Delegates attention with a key-value cache, including the cache, to the backend."""

    def __init__(self) -> None:
        super().__init__(BackendWithStateDemo)


@dataclass(slots=True)
class StatefulProgram:
    """A program with its mutable state; the handle of a delegate.

    Attributes:
        program: Its inputs are the state, then the inputs of the call; its outputs are the new
            state, then the outputs of the call.
        state: The current values.
    """

    program: TextProgram
    state: list[torch.Tensor]


class StateDemoRuntime(TextRuntime):
    """Executes the blobs of ``BackendWithStateDemo`` and keeps their state between calls."""

    backend: ClassVar[type[TextBackend]] = BackendWithStateDemo

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[StoredSpec],
        named_data: Mapping[str, memoryview],
    ) -> StatefulProgram:
        """Return the program of a blob with its initial state.

        Raises:
            BlobError: The blob is invalid.
        """
        program: TextProgram = super().init(blob, compile_specs, named_data)
        state = [item.clone() for item in program.inputs if isinstance(item, torch.Tensor)]
        if any(isinstance(item, str) for item in program.inputs[: len(state)]):
            raise BlobError("found an input before a state tensor; expected all state first")
        if len(state) > len(program.outputs):
            raise BlobError(f"found {len(program.outputs)} outputs for {len(state)} state tensors")
        return StatefulProgram(program, state)

    def input_count(self, handle: StatefulProgram) -> int:
        """Return the number of inputs of a call."""
        return len(handle.program.inputs) - len(handle.state)

    def execute_logged(
        self,
        handle: StatefulProgram,
        inputs: Sequence[torch.Tensor],
        log: Callable[..., None],
    ) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``, log every step, and store the new state.

        Args:
            log: Called with each step's identifier, start and end in nanoseconds, and outputs.

        Raises:
            DelegateInputError: The number of inputs or a dtype does not match.
            DelegateRunError: A step cannot be computed; the state is unchanged.
        """
        results = super().execute_logged(handle.program, [*handle.state, *inputs], log)
        count = len(handle.state)
        for old, new in zip(handle.state, results[:count], strict=True):
            if old.shape != new.shape or old.dtype != new.dtype:
                raise DelegateRunError(
                    f"a state of {old.dtype}{list(old.shape)} became {new.dtype}{list(new.shape)}"
                )
        handle.state[:] = results[:count]
        return results[count:]


class KvCacheAttention(nn.Module):
    """Attention of one token to all tokens in its key-value cache.

    Args:
        length: Capacity of the cache in tokens.
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
        """Write key and value to the cache; return the attention, shape ``[1, width]``."""
        self.keys.index_copy_(0, position, key)
        self.values.index_copy_(0, position, value)
        weights = torch.softmax(query @ self.keys.t() + mask, -1)
        return weights @ self.values
