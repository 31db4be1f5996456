"""Offsets and initial values of mutable buffers, shared by all methods."""

from __future__ import annotations

from lowerdeck.emitter.errors import UnsupportedError
from lowerdeck.emitter.frontend.constants import ConstantPool
from lowerdeck.emitter.ir.values import Storage, TensorValue
from lowerdeck.serializer import Buffer

_ALIGNMENT = 16


class StatePool:
    """Pool of the mutable buffers of a program.

    Methods may share arenas at run time, so buffers have fixed offsets in a separate memory
    without activations.

    Args:
        zeroed_memory: Whether zero-initialized buffers need no data.
    """

    def __init__(self, zeroed_memory: bool) -> None:
        self._constants = ConstantPool()
        self._zeroed_memory = zeroed_memory
        self._initial: dict[str, int] = {}
        self._offsets: dict[str, tuple[int, int]] = {}
        self.size: int = 0

    @property
    def buffers(self) -> list[Buffer]:
        """The initial values; entry 0 is reserved and empty."""
        return self._constants.buffers

    def place(self, key: str, storage: Storage) -> int:
        """Return the offset in bytes of a state, which is the same in all methods that use it.

        Raises:
            UnsupportedError: If a buffer of this name has another size in another method.
        """
        if key not in self._offsets:
            self._offsets[key] = (self.size, storage.nbytes)
            self.size += -(-storage.nbytes // _ALIGNMENT) * _ALIGNMENT
        offset, nbytes = self._offsets[key]
        if nbytes != storage.nbytes:
            raise UnsupportedError(
                f"the mutable buffer {key!r} has {nbytes} bytes in one method and "
                f"{storage.nbytes} in another; state is shared by name, so rename one of them"
            )
        return offset

    def index_of(self, root: TensorValue) -> int:
        """Return the index of the initial value of a buffer, 0 if it needs none."""
        if root.key not in self._initial and root.constant is not None:
            data = self._constants.bytes_of(root.constant, root.dim_order)
            zero = not root.constant.count_nonzero().item()
            skipped = not len(data) or (zero and self._zeroed_memory)
            self._initial[root.key] = 0 if skipped else self._constants.index_of(data)
        return self._initial[root.key]
