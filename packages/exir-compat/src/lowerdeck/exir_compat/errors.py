"""Errors and warnings of this package."""


class ExirCompatError(Exception):
    """Base of all errors of ``lowerdeck.exir_compat``."""


class SettingError(ExirCompatError, ValueError):
    """A setting of exir, or its value, is not supported."""


class UnknownMethodError(ExirCompatError, KeyError):
    """A requested method does not exist."""

    def __str__(self) -> str:
        """Return the message, which ``KeyError`` would quote."""
        return str(self.args[0])


class TransformError(ExirCompatError, TypeError):
    """A pass returned an unsupported result."""


class SettingWarning(UserWarning):
    """A setting of exir is ignored, or has another effect than in exir."""
