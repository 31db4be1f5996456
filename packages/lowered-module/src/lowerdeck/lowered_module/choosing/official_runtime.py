"""The bridge to the official runtime: files run in processes of their own.

``main`` alone loads ``executorch``, which must be installed for it, once for all files: each then
runs in a fork of that process, since the runtime ends its process over some of them. Importing
torch and the runtime takes seconds, a fork milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch

from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.serializer import official_binding

_A_SAMPLE = 0.02
"""Seconds that a sample takes at least: several calls of a small model."""
_LONG = 60.0
"""Seconds after which no round begins, when there were some."""
_FEW = 3
_PATIENCE = 600.0
_PROGRAM = f"from {__name__} import main; main()"
_FORKS = hasattr(os, "fork")


class OfficialRuntime:
    """The official runtime, in processes that are started when something is first asked of it.

    Example:
        >>> from lowerdeck.lowered_module.choosing.official_runtime import OfficialRuntime
        >>> with OfficialRuntime() as runtime:  # doctest: +SKIP
        ...     outputs, seconds = runtime.first_outputs(file, inputs)
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End its process, whatever it does."""
        if self._process is not None:
            _kill(self._process)
        self._end()
        self._folder.cleanup()

    def backends(self) -> list[str]:
        """Return the names of the backends that the installed runtime has.

        Raises:
            LoweringError: It is not installed.
        """
        return list(self._asked({"do": "backends"}))

    def first_outputs(self, file: Path, inputs: Sequence[Any]) -> tuple[list[Any], float]:
        """Return what the first call of ``forward`` gives, and the seconds of the second.

        Args:
            file: The program.
            inputs: Flat inputs, as the program numbers them.

        Raises:
            LoweringError: The runtime refuses the file or the call, or ends with it.
        """
        found = self._path("outputs.pt")
        what = {"do": "call", "files": [str(file)], "outputs": str(found)}
        seconds = float(self._asked(what | self._given(inputs)))
        return torch.load(found, weights_only=True), seconds

    def seconds_in_turn(
        self, files: Sequence[Path], inputs: Sequence[Any], rounds: int
    ) -> list[list[float]]:
        """Return the seconds of a call of each file, one figure for each round.

        In a round every file has its turn, so that a slow moment of the machine falls on all.

        Args:
            files: The programs.
            inputs: Flat inputs of ``forward``.
            rounds: How many; fewer where they take more than a minute.

        Raises:
            LoweringError: The runtime ends with one of them.
        """
        what = {"do": "time", "files": [str(file) for file in files], "rounds": rounds}
        found: list[list[float]] = self._asked(what | self._given(inputs))
        return found

    def _path(self, name: str) -> Path:
        return Path(self._folder.name, name)

    def _given(self, inputs: Sequence[Any]) -> dict[str, str]:
        given = self._path("inputs.pt")
        torch.save(list(inputs), given)
        return {"inputs": str(given)}

    def _asked(self, what: Mapping[str, Any]) -> Any:
        """Return what this module says as a program of its own."""
        log = self._path("log")
        # A new process may have said why it ends before anybody looks at its log.
        begin = 0 if self._process is None else log.stat().st_size
        if self._process is None:
            self._process = _started(log)
        process = self._process
        late = threading.Event()

        def give_up() -> None:
            late.set()
            _kill(process)

        patience = threading.Timer(_PATIENCE, give_up)
        patience.start()
        try:
            answer, ended = _answer(process, what)
        finally:
            patience.cancel()
        if ended is None or not _FORKS:
            code = self._end()
            ended = code if ended is None else ended
        if late.is_set():
            raise LoweringError(f"the runtime said nothing for {_PATIENCE:.0f} s")
        if ended or answer is None:
            told = log.read_text(errors="replace")[begin:].strip().splitlines()
            why = f"it ended with {ended}" if ended <= 0 or not told else told[-1]
            raise LoweringError(f"the official runtime failed: {why}")
        return json.loads(answer)

    def _end(self) -> int:
        """End the process, and return with what it ended."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with suppress(OSError):
            process.communicate()
        return process.returncode


def _started(log: Path) -> subprocess.Popen[str]:
    with log.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=_FORKS,
        )


def _answer(
    process: subprocess.Popen[str], what: Mapping[str, Any]
) -> tuple[str | None, int | None]:
    """Return the answer to a question, and with what the fork that gave it ended.

    Either is None where the whole process ended instead.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    # Who does not listen has ended, which the answer that does not come tells.
    with suppress(OSError):
        print(json.dumps(what), file=process.stdin, flush=True)
    answer = None
    for line in process.stdout:
        if line.startswith("ended "):
            return answer, int(line.split()[1])
        answer = line
    return answer, None


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(OSError):
        if _FORKS:
            os.killpg(process.pid, signal.SIGKILL)  # its forks too
        else:
            process.kill()


def main() -> None:
    """Do what each line of standard input says, in JSON, and print an answer in a line.

    A line that says how it ended follows each. Without forks the first question is the last one.
    """
    # The runtime prints where it likes; answers go where nothing else does.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        binding = official_binding()
    except ModuleNotFoundError:
        sys.exit("executorch is not installed: pip install executorch")
    # Python warns of forks beside threads, which numpy has; none holds a lock while we wait here.
    warnings.simplefilter("ignore", DeprecationWarning)
    for line in sys.stdin:
        what: dict[str, Any] = json.loads(line)
        if not _FORKS:
            print(json.dumps(_done(what, binding)), file=answers)
            print("ended 0", file=answers)
            return
        child = os.fork()
        if not child:
            _answer_and_exit(what, binding, answers.fileno())
        _, status = os.waitpid(child, 0)
        print(f"ended {os.waitstatus_to_exitcode(status)}", file=answers)


def _answer_and_exit(what: dict[str, Any], binding: dict[str, Any], answers: int) -> None:
    code = 1
    try:
        os.write(answers, f"{json.dumps(_done(what, binding))}\n".encode())
        code = 0
    except BaseException:
        # Whatever it is: a fork must never go on as its parent.
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _done(what: dict[str, Any], binding: dict[str, Any]) -> Any:
    if what["do"] == "backends":
        return list(binding["_get_registered_backend_names"]())
    inputs = torch.load(what["inputs"], weights_only=True)
    calls = [_call(binding, file, inputs) for file in what["files"]]
    if what["do"] == "call":
        torch.save([_owned(one) for one in calls[0]()], what["outputs"])
        return _seconds(calls[0], 1)
    repeats = [_repeats(call) for call in calls]
    rounds: list[list[float]] = []
    start = time.perf_counter()
    while len(rounds) < what["rounds"] and (
        len(rounds) < _FEW or time.perf_counter() - start < _LONG
    ):
        rounds.append([_seconds(call, count) for call, count in zip(calls, repeats, strict=True)])
    return [list(each) for each in zip(*rounds, strict=True)]


def _call(
    binding: dict[str, Any], file: str, inputs: Sequence[Any]
) -> Callable[[], Sequence[Any]]:
    module = binding["_load_for_executorch"](file)
    return lambda: module.forward(inputs)


def _owned(value: Any) -> Any:
    # What a call returns lies in the runtime's memory.
    return value.clone() if isinstance(value, torch.Tensor) else value


def _repeats(call: Callable[[], object]) -> int:
    """Return how many calls make a sample; the first ones, which plan memory, are not counted."""
    for _ in range(3):
        call()
    return max(1, round(_A_SAMPLE / max(_seconds(call, 1), 1e-7)))


def _seconds(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
