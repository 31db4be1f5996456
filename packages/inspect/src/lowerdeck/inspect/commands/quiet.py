"""What other libraries say of themselves while a command runs, which its user cannot act on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# torch misses numpy, which nothing of ours needs; torchao misses CUDA, and is outdated for torch.
_WARNING = "Failed to initialize NumPy"
_LOGGERS = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hold back what torch and torchao tell everybody who imports them; errors are told."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_WARNING, category=UserWarning)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
