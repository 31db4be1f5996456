"""Suppress third-party warnings during commands."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# torch warns of missing numpy, which we do not need; torchao of missing CUDA and of torch's
# version.
_WARNING = "Failed to initialize NumPy"
_LOGGERS = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress warnings that torch and torchao emit on import; errors are shown."""
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
