"""Lazily compiled functions of generated source, with the model's line in errors."""

from __future__ import annotations

import builtins
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any, Protocol

import torch

from lowerdeck.torch_base import SourceFrame, assume_constant_result
from lowerdeck.unflatten import contract, specializations
from lowerdeck.unflatten.call_signature import PENDING, one_line
from lowerdeck.unflatten.codegen.names import readable

FILE_PREFIX = "<lowerdeck.unflatten "
"""Prefix of the file names of generated source."""

NAME_SOURCE = "_lowerdeck_name_source"
"""Global name of ``name_source`` in generated code."""

_COMPILE, _FUNCTION = "_lowerdeck_compile", "_lowerdeck_function"
"""Global names of a function and of its lazy compiler."""

_HANDLER = f"""
    except Exception:
        {NAME_SOURCE}()
        raise
"""

TORCH_FOLDER = str(Path(torch.__file__).parent)
"""torch's source folder; its frames are skipped in favour of the model's."""

_FILE_NUMBERS = count()
_OURS = {specializations.__file__, contract.__file__}
_MESSAGE = "_lowerdeck_message"
"""Attribute of an error with its original message."""


class _Source(Protocol):
    """Source of one function, with its globals."""

    @property
    def text(self) -> str: ...

    @property
    def names(self) -> Mapping[str, object]: ...


def compile_function(text: str, scope: dict[str, Any]) -> FunctionType:
    """Return the ``forward`` of this source; tracebacks show its lines and the model's.

    Args:
        text: The source; its first line is the whole signature.
        scope: The function's globals; filled.
    """
    head, _, body = text.rstrip("\n").partition("\n")
    # The handler is free unless a line raises.
    text = f"{head}\n    try:\n    " + body.replace("\n", "\n    ") + _HANDLER
    file = f"{FILE_PREFIX}{next(_FILE_NUMBERS)}>"
    exec(compile(text, file, "exec"), scope)
    # A None mtime keeps the entry: linecache cannot stat a file that does not exist.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return scope["forward"]  # type: ignore[no-any-return]


def deferred_function(parameters: str, write: Callable[[], _Source]) -> FunctionType:
    """Return a function that generates and compiles its source at its first call.

    Its ``__code__`` is replaced in place, for all classes that share the function. Concurrent
    first calls compile equal code.

    Args:
        parameters: Source of the parameter list after ``self``.
    """
    # No __name__: a compiler would look up these globals in the module of that name.
    scope: dict[str, Any] = {"__builtins__": builtins, NAME_SOURCE: name_source}
    function = FunctionType(_first_code(parameters), scope, "forward")

    # Called, not traced, by compilers.
    @assume_constant_result
    def compile_source() -> None:
        source = write()
        scope.update(source.names)
        function.__code__ = compile_function(source.text, scope).__code__

    scope[_COMPILE], scope[_FUNCTION] = compile_source, function
    return function


@lru_cache(4096)
def _first_code(parameters: str) -> CodeType:
    """Return code that compiles the function at its first call, and then calls it.

    The arguments are passed to the compiled function. So the parameter list is rewritten as an
    argument list: without ``/`` and ``*``, and with the keyword-only ``PENDING`` passed by name.
    """
    arguments = parameters.removesuffix(", /").replace(f" *, {PENDING}", f" {PENDING}")
    arguments = arguments.replace(f", {PENDING}", f", {PENDING}={PENDING}")
    call = f"{_COMPILE}(); return {_FUNCTION}(self{arguments})"
    scope: dict[str, Any] = {}
    exec(compile(f"def forward(self{parameters}): {call}", "<first call>", "exec"), scope)
    return scope["forward"].__code__  # type: ignore[no-any-return]


def name_source() -> None:
    """Add the model's line to the message of the current exception, in place.

    An error whose message is not text or already names this line is unchanged.
    """
    error = None if torch.compiler.is_compiling() else sys.exception()
    if error is None or len(error.args) != 1:
        return
    message = getattr(error, _MESSAGE, error.args[0])
    if not isinstance(message, str):
        return
    failing = [line.strip().partition("  # ") for line in _failing_lines(error.__traceback__)]
    if not failing:
        return
    code, _, source = failing[-1]
    if not source or source in message:
        return
    around = [line for _, _, line in failing if line and not line.startswith(TORCH_FOLDER)]
    suffix = f", called by {around[-1]}" if around and source.startswith(TORCH_FOLDER) else ""
    error.__dict__[_MESSAGE] = message
    error.args = (f"{message}\n(in {readable(code)!r}, which is {source}{suffix})",)


@lru_cache(4096)
def location(frame: SourceFrame) -> str:
    """Return the model source location of a frame, on one line."""
    return one_line(f"{frame.file}:{frame.line} in {frame.function}: {frame.code}")


def _failing_lines(traceback: TracebackType | None) -> list[str]:
    """Return the generated lines in the traceback of an error of torch or of this package.

    Errors of hooks and replaced modules keep their message.
    """
    lines: list[str] = []
    is_ours = False
    for file, line in _steps(traceback):
        if file.startswith(FILE_PREFIX):
            lines.append(linecache.getline(file, line))
            is_ours = True
        elif not file.startswith(TORCH_FOLDER) and file not in _OURS:
            is_ours = False
    return lines if is_ours else []


def _steps(traceback: TracebackType | None) -> Iterator[tuple[str, int]]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
