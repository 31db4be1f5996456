"""Counted steps of a call, instead of its time.

A step is a line of Python, a call, or 16 bytes that a built-in method or a digest walks over: what
hides in one line of C (a copy, a comparison of gigabytes) would else count as nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from hashlib import blake2b
from types import FrameType
from typing import Any
from unittest import mock

from lowerdeck.inspect.report import changes
from lowerdeck.serializer.flatbuffer import blobs

_WALKS = {
    *("tobytes", "rstrip", "lstrip", "strip", "encode", "decode", "translate", "copy", "hex"),
    *("count", "index", "isprintable", "replace", "splitlines", "update", "cast"),
}
_BYTES = 16


class StepCounter:
    """Counts the steps of one call.

    Attributes:
        steps: Those that were counted so far.
    """

    def __init__(self) -> None:
        self.steps = 0

    def count(self, call: Callable[[], object], *errors: type[Exception]) -> int:
        """Return the steps of a call, which may end in one of some errors.

        Args:
            errors: The errors that it may end in; any other one comes through.
        """
        tracer, profiler = sys.gettrace(), sys.getprofile()
        with (
            mock.patch.object(blobs, "blake2b", self._walked(blake2b)),
            mock.patch.object(changes, "blake2b", self._walked(blake2b)),
        ):
            sys.settrace(self._trace)
            sys.setprofile(self._profile)
            try:
                call()
            except errors:
                pass
            finally:
                sys.setprofile(profiler)
                sys.settrace(tracer)
        return self.steps

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.steps += 1
        return self._trace

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "c_call":
            return
        self.steps += 1
        if argument.__name__ in _WALKS:
            owner = argument.__self__
            if isinstance(owner, memoryview):
                self.steps += owner.nbytes // _BYTES
            elif isinstance(owner, str | bytes | bytearray | list | tuple):
                self.steps += len(owner) // _BYTES

    def _walked(self, digest: Callable[..., Any]) -> Callable[..., Any]:
        def counted(data: Any, **options: Any) -> Any:
            self.steps += memoryview(data).nbytes // _BYTES
            return digest(data, **options)

        return counted
