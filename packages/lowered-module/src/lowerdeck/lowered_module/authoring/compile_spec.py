"""One setting that a backend's compiler, and later its runtime, is given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """One key and its value, written into the file beside the delegate's blob.

    Attributes:
        key: Name of the setting, such as ``"max_value"``.
        value: The setting as bytes; what they mean is between a backend and its runtime.
    """

    key: str
    value: bytes
