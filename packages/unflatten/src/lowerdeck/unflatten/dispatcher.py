"""A submodule that eager calls several times, each time computing something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowerdeck.unflatten.generated_module import GeneratedModule
from lowerdeck.unflatten.interpreter_module import InterpreterModule


class SpecialisedCall(InterpreterModule):
    """One more form of a module's call: code of its own, everything else from the module itself.

    It owns no state and is no submodule, so it adds no name to any listing.
    """

    def attach(self, owner: GeneratedModule) -> None:
        """Read state, children and hooks from ``owner``."""
        for name, value in owner.__dict__.items():
            if name.startswith("_") and isinstance(value, (dict, set)):
                self.__dict__[name] = value
        self.__dict__["_owner"] = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_owner"], name)


class InterpreterModuleDispatcher(InterpreterModule):
    """A submodule with several specialised forms, chosen by the code of its caller.

    The caller's code names the form, so that nothing is counted: calls may nest, run in threads,
    fail,
    or be made directly. A direct call runs the first form.
    """

    def add_call(self, call: SpecialisedCall) -> None:
        """Add one more form; it becomes the next in ``call_modules``."""
        call.attach(self)
        self.__dict__[f"_call_{len(self.call_modules())}"] = call

    def call_modules(self) -> Sequence[InterpreterModule]:
        """Return all forms in order of first use; the first is this module itself."""
        forms: list[InterpreterModule] = [self]
        while f"_call_{len(forms)}" in self.__dict__:
            forms.append(self.__dict__[f"_call_{len(forms)}"])
        return forms
