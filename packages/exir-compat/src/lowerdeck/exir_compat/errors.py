"""The errors that this package raises, and its warning."""


class ExirCompatError(Exception):
    """Base of every error that ``lowerdeck.exir_compat`` raises on purpose."""


class SettingError(ExirCompatError, ValueError):
    """A setting of exir's, or a value of one, that nothing here can do; the message says why."""


class UnknownMethodError(ExirCompatError, KeyError):
    """A method was asked for that the program does not have."""

    def __str__(self) -> str:
        """Return the message; ``KeyError`` would quote it."""
        return str(self.args[0])


class TransformError(ExirCompatError, TypeError):
    """A pass returned what no program can be made of."""


class SettingWarning(UserWarning):
    """A setting of exir's changes nothing here."""
