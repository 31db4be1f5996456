"""Tasks: partitions as bytes, to be compiled in another process."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module.authoring.backend import PreprocessResult, with_plain_bytes
from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.program.pickling import dump_program, load_program
from lowerdeck.torch_base import storage_identity

# In bytes. Smaller tensors are saved together and stay in the task: what describes a tensor takes
# about a kilobyte.
_SMALL = 4096


@dataclass(frozen=True, slots=True)
class Task:
    """A partition as bytes.

    Attributes:
        program: The partition, which refers to its tensors by number.
        tensors: Numbers of tensors, and the list of these tensors as ``torch.save`` writes it:
            its bytes, or the file that they are in. Tensors that share memory are in one list.
        backend: The backend class; the other process must be able to import it.
        compile_specs: The compile specs of the partition.
    """

    program: bytes
    tensors: Sequence[tuple[Sequence[int], bytes | Path]]
    backend: Any
    compile_specs: list[Any]

    @classmethod
    def of(cls, program: ExportedProgram, backend: Any, compile_specs: list[Any]) -> Task:
        """Return the task of compiling ``program``.

        Raises:
            PreprocessError: The program holds what cannot be pickled.
        """
        tensors: list[torch.Tensor] = []
        try:
            content = dump_program(program, tensors)
            groups: dict[int | None, list[int]] = {}
            for number, tensor in enumerate(tensors):
                groups.setdefault(_large_storage(tensor), []).append(number)
            saved = []
            for numbers in groups.values():
                stream, group = io.BytesIO(), [tensors[number] for number in numbers]
                torch.save([_alone(*group)] if len(group) == 1 else group, stream)
                saved.append((numbers, stream.getvalue()))
        except Exception as error:
            raise PreprocessError(
                f"a partition cannot be sent to an executor ({type(error).__name__}: {error}): "
                "lower without an executor"
            ) from error
        return cls(content, saved, backend, compile_specs)

    def run(self) -> PreprocessResult:
        """Return what the backend makes of the partition; called in the other process.

        Raises:
            PreprocessError: The program or its weights cannot be read here.
            Exception: Whatever the backend raises.
        """
        tensors: dict[int, torch.Tensor] = {}
        try:
            for numbers, data in self.tensors:
                # A mapped file is private: a backend may write to what it is given.
                source = data if isinstance(data, Path) else io.BytesIO(data)
                loaded = torch.load(source, weights_only=True, mmap=source is data)
                tensors.update(zip(numbers, loaded, strict=True))
            program = load_program(self.program, [tensors[n] for n in range(len(tensors))])
        except Exception as error:
            raise PreprocessError(
                f"a worker cannot read a partition ({type(error).__name__}: {error}): use the "
                "same torch on both sides, and for SharedWeights a directory that all workers see "
                "under one path until the last lowering ends; or lower without an executor"
            ) from error
        return with_plain_bytes(self.backend.preprocess(program, self.compile_specs))


def _large_storage(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's memory, None for small and sparse tensors."""
    storage = storage_identity(tensor)
    is_large = storage is not None and tensor.untyped_storage().nbytes() >= _SMALL
    return storage if is_large else None


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the rest of its memory, which torch.save would write as well."""
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or not tensor.is_contiguous()
        or tensor.nbytes >= tensor.untyped_storage().nbytes()
    ):
        return tensor
    copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied


class SharedWeights(Executor):
    """An executor whose workers get weights out of a directory, and not with their tasks.

    Each weight is written once, however many partitions, methods and lowerings read it, and
    however often work is done again. Workers map the files, and change none of them.

    Args:
        executor: Who does the work.
        directory: One that all workers see under the same path, such as a network share, or
            ``/dev/shm`` on one machine. A folder in it is made, for the user alone, and removed by
            ``shutdown``; the executor itself goes on.

    Attributes:
        directory: The folder that was made.
        written: How many bytes were written to it.

    Raises:
        PreprocessError: Nothing can be written there.

    Example:
        >>> import tempfile, torch
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from lowerdeck.lowered_module import lower
        >>> from lowerdeck.lowered_module.testing import TaggingPartitioner
        >>> model = torch.nn.Linear(64, 64), (torch.ones(1, 64),)
        >>> with (
        ...     tempfile.TemporaryDirectory() as folder,
        ...     ThreadPoolExecutor(2) as threads,
        ...     SharedWeights(threads, folder) as executor,
        ... ):
        ...     lowered = lower(model, TaggingPartitioner(lambda _: "all"), executor=executor)
        >>> executor.written // 1000  # kB: the weight, and what describes it
        18
    """

    def __init__(self, executor: Executor, directory: str | os.PathLike[str]) -> None:
        try:
            folder = tempfile.mkdtemp(prefix="weights-", dir=directory)
        except OSError as error:
            raise _unwritable(directory, error) from error
        self.directory: Path = Path(folder).resolve()
        self.written: int = 0
        self._executor = executor

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send work to the executor, with its weights in files.

        Args:
            *args: With what; in tasks of ``lower`` and ``to_backend``, weights become files.
            **kwargs: Likewise, as they are.

        Raises:
            PreprocessError: A weight cannot be written.
        """
        return self._executor.submit(fn, *map(self._without_weights, args), **kwargs)

    def shutdown(
        self,
        wait: bool = True,  # noqa: ARG002 - the lowerings have waited
        *,
        cancel_futures: bool = False,  # noqa: ARG002 - likewise
    ) -> None:
        """Remove the files.

        Args:
            wait: Taken as by every executor; changes nothing, because lowerings wait for theirs.
        """
        shutil.rmtree(self.directory, ignore_errors=True)

    def _without_weights(self, value: Any) -> Any:
        if not isinstance(value, Task):
            return value
        return replace(value, tensors=[(n, self._filed(data)) for n, data in value.tensors])

    def _filed(self, data: bytes | Path) -> bytes | Path:
        if isinstance(data, Path) or len(data) < _SMALL:
            return data
        path = self.directory / hashlib.sha256(data).hexdigest()
        if not path.exists():
            # Two threads that lower at once may write the same.
            draft = path.with_suffix(f".{threading.get_ident()}")
            try:
                draft.write_bytes(data)
                draft.replace(path)
            except OSError as error:
                raise _unwritable(self.directory, error) from error
            self.written += len(data)
        return path


def _unwritable(directory: str | os.PathLike[str], error: OSError) -> PreprocessError:
    return PreprocessError(
        f"no weights can be written to {os.fspath(directory)!r} ({error.strerror}): name another "
        "directory that all workers see, or lower without SharedWeights"
    )
