"""The ``lowerdeck`` command, and HTML pages of ExecuTorch files, without torch."""

# ruff: noqa: F403, F405 (`__all__` lists the names once; type checkers resolve them through the
# star imports)

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # ``__all__`` selects their public names
    from lowerdeck.inspect.commands.answers import *
    from lowerdeck.inspect.commands.paths import *
    from lowerdeck.inspect.installed import *
    from lowerdeck.inspect.report.documents import *
    from lowerdeck.inspect.report.page import *
    from lowerdeck.inspect.report.payloads import *

__all__ = [
    # Write a command
    "Command",
    "CommandError",
    "ExitStatus",
    "say",
    "reading",
    "writing",
    "check_paths",
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

# Search order: all packages need the first modules, few draw pages.
_MODULES = (
    *("commands.answers", "commands.paths", "installed"),
    *("report.payloads", "report.page", "report.documents"),
)

if not TYPE_CHECKING:  # A type checker would accept any name.

    def __getattr__(name: str) -> Any:
        """Return a public name, importing its module on first use."""
        for module in _MODULES if name in __all__ else ():
            submodule = importlib.import_module(f"{__name__}.{module}")
            if hasattr(submodule, name):
                globals()[name] = getattr(submodule, name)
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Return all public names, including those not imported yet."""
        return sorted({*globals(), *__all__})
