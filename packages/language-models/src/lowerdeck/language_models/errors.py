"""The errors that this package raises."""

from lowerdeck.inspect import ExitStatus


class LanguageModelError(Exception):
    """Base of every error that ``lowerdeck.language_models`` raises on purpose.

    Attributes:
        exit_status: What a command of the ``lowerdeck`` script ends with.
    """

    exit_status: int = ExitStatus.BAD_INPUT


class FolderError(LanguageModelError, ValueError):
    """A folder is none of a model that can be loaded; the message says what it lacks."""


class UnsupportedModelError(LanguageModelError, NotImplementedError):
    """A model cannot be exported as a decoder with a cache; the message says why."""


class GenerationError(LanguageModelError, ValueError):
    """A prompt, or a file, cannot be generated with; the message says what to do."""


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; torch says what to try in many more."""
    return str(error).strip().partition("\n")[0]
