"""Contents of an ETDump file: runs and their events."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProfileEvent:
    """One timed event.

    Attributes:
        name: ``native_call_`` and the operator for a kernel, ``DELEGATE_CALL`` for a delegate,
            ``Method::execute`` for a whole call, as in ExecuTorch's runtime.
        start_time: Start in nanoseconds, from an arbitrary origin.
        chain_index: Index of the chain.
        instruction_id: Index of the instruction in the chain; -1 for other events.
        delegate_debug_id: Debug identifier of an event inside a delegate, else None.
        delegate_debug_metadata: The backend's metadata of this event.
    """

    name: str
    start_time: int
    end_time: int
    chain_index: int = 0
    instruction_id: int = -1
    delegate_debug_id: int | str | None = None
    delegate_debug_metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class RunData:
    """One run, such as one call of a method.

    Attributes:
        name: Name shared by related runs; ExecuTorch's runtime uses ``Execute``.
        events: The events of the run, ordered by end time.
        bundled_input_index: Index of the test case, -1 for none.
    """

    name: str = "Execute"
    events: list[ProfileEvent] = field(default_factory=list)
    bundled_input_index: int = -1
