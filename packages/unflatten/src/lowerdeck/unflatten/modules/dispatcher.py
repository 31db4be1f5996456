"""A submodule that eager calls several times, each time computing something else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.modules.container import Container
from lowerdeck.unflatten.modules.generated_module import (
    FUNCTIONS,
    Body,
    Function,
    class_with,
)
from lowerdeck.unflatten.modules.interpreter_module import InterpreterModule


class InterpreterModuleDispatcher(InterpreterModule):
    """A submodule with several specialised forms, chosen by the code of its caller.

    The caller's code names the form, so that nothing is counted: calls may nest, run in threads,
    fail, or be made directly. A direct call runs the first form.
    """

    def call_modules(self) -> Sequence[InterpreterModule]:
        """Return all forms in order of first use; the first is this module itself.

        The others own nothing: they read this module's state, children and hooks.
        """
        _, *others = _functions(type(self))
        held: Body = self.__dict__[PRIVATE]
        return [self, *map(partial(_form, self), held.others, others)]

    def __getattr__(self, name: str) -> Any:
        # Graphs call a further form by the path "step..1": every other name is for torch.
        if name:
            return super().__getattr__(name)
        forms = Container()
        for number, form in enumerate(self.call_modules()[1:], start=1):
            forms.add_module(str(number), form)
        return forms


def _form(
    module: InterpreterModuleDispatcher, body: Body, function: Function
) -> InterpreterModule:
    form = InterpreterModule(body, class_with(InterpreterModule, [function]))
    for name, value in module.__dict__.items():
        if name != PRIVATE:
            form.__dict__[name] = value
    return form


def _functions(cls: type) -> Sequence[Function]:
    """Return the functions of all forms."""
    found: Sequence[Function] = getattr(cls, FUNCTIONS)
    return found
