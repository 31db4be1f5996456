"""Errors of this package."""

from lowerdeck.inspect import ExitStatus


class LanguageModelError(Exception):
    """Base of all errors of ``lowerdeck.language_models``.

    Attributes:
        exit_status: The exit status of a command that fails with it.
    """

    exit_status: int = ExitStatus.BAD_INPUT


class FolderError(LanguageModelError, ValueError):
    """A folder or file does not hold a model or tokenizer that can be loaded."""


class UnsupportedModelError(LanguageModelError, NotImplementedError):
    """The model cannot be exported as a decoder with a cache."""


class GenerationError(LanguageModelError, ValueError):
    """The prompt or the file cannot be used to generate text."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message: torch appends many lines of advice."""
    return str(error).strip().partition("\n")[0]
