"""The ``lowerdeck`` command, and HTML pages of ExecuTorch files, without torch."""

import importlib
from typing import TYPE_CHECKING, Any

from lowerdeck.inspect.commands.answers import (
    CommandError,
    ExitStatus,
    is_closed,
    reading,
    say,
    writing,
)
from lowerdeck.inspect.commands.paths import keep_apart
from lowerdeck.inspect.installed import installed_entries

if TYPE_CHECKING:
    from lowerdeck.inspect.commands.protocol import Command
    from lowerdeck.inspect.report import html_diff, html_page, html_report
    from lowerdeck.inspect.report.payloads import PayloadGraph, PayloadNode, PayloadValue

__all__ = [
    # Write a command
    "Command",
    "CommandError",
    "ExitStatus",
    "say",
    "reading",
    "writing",
    "keep_apart",
    "is_closed",
    # What is installed
    "installed_entries",
    # HTML pages
    "html_report",
    "html_diff",
    "html_page",
    # Payloads of delegates
    "PayloadGraph",
    "PayloadNode",
    "PayloadValue",
]

# Loaded at first use: all packages import the front door for their errors, few draw pages.
_AT_FIRST_USE = {
    "Command": "lowerdeck.inspect.commands.protocol",
    "html_report": "lowerdeck.inspect.report",
    "html_diff": "lowerdeck.inspect.report",
    "html_page": "lowerdeck.inspect.report",
    "PayloadGraph": "lowerdeck.inspect.report.payloads",
    "PayloadNode": "lowerdeck.inspect.report.payloads",
    "PayloadValue": "lowerdeck.inspect.report.payloads",
}

if not TYPE_CHECKING:  # A type checker would accept any name.

    def __getattr__(name: str) -> Any:
        """Import a name at its first use."""
        if name not in _AT_FIRST_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_AT_FIRST_USE[name]), name)
        return value

    def __dir__() -> list[str]:
        """Return all public names, including those not imported yet."""
        return sorted({*globals(), *__all__})
