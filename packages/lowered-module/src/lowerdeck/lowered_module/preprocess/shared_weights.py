"""An executor around another one: weights travel once, through a directory."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.preprocess.transport import Parcel


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
        written: How many bytes of weights were written to it.

    Raises:
        PreprocessError: Nothing can be written there.

    Example:
        >>> import tempfile, torch
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from lowerdeck.lowered_module import lower
        >>> from lowerdeck.lowered_module.testing import TaggingPartitioner
        >>> model = torch.nn.Linear(32, 32), (torch.ones(1, 32),)
        >>> with (
        ...     tempfile.TemporaryDirectory() as folder,
        ...     ThreadPoolExecutor(2) as threads,
        ...     SharedWeights(threads, folder) as executor,
        ... ):
        ...     lowered = lower(model, TaggingPartitioner(lambda _: "all"), executor=executor)
        >>> executor.written
        4096
    """

    def __init__(self, executor: Executor, directory: str | os.PathLike[str]) -> None:
        try:
            made = tempfile.mkdtemp(prefix="weights-", dir=directory)
        except OSError as error:
            raise _unwritable(directory, error) from error
        self.directory: Path = Path(made).resolve()
        self.written: int = 0
        self._executor = executor

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send work to the executor, with its weights in files.

        Args:
            fn: What to call.
            *args: With what; in parcels of ``lower`` and ``to_backend``, weights become files.
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
            cancel_futures: Likewise.
        """
        shutil.rmtree(self.directory, ignore_errors=True)

    def _without_weights(self, value: Any) -> Any:
        if not isinstance(value, Parcel):
            return value
        filed = {
            number: replace(one, data=self._filed(one.data))
            for number, one in value.weights.items()
        }
        return replace(value, weights=filed)

    def _filed(self, data: bytes | Path) -> Path:
        if isinstance(data, Path):
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
