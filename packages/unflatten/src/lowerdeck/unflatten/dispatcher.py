"""A submodule that eager calls several times, each time computing something else."""

from __future__ import annotations

from collections.abc import Sequence

from lowerdeck.unflatten.generated_module import PRIVATE, class_with
from lowerdeck.unflatten.interpreter_module import InterpreterModule


class InterpreterModuleDispatcher(InterpreterModule):
    """A submodule with several specialised forms, chosen by the code of its caller.

    The caller's code names the form, so that nothing is counted: calls may nest, run in threads,
    fail, or be made directly. A direct call runs the first form.
    """

    def call_modules(self) -> Sequence[InterpreterModule]:
        """Return all forms in order of first use; the first is this module itself.

        The others own nothing: they read this module's state, children and hooks.
        """
        count = len(self.__dict__[PRIVATE].others)
        return [self, *(self._form(number) for number in range(1, count + 1))]

    def _form(self, number: int) -> InterpreterModule:
        body = self.__dict__[PRIVATE].others[number - 1]
        function = getattr(type(self), f"_forward_{number}")
        form = InterpreterModule(body, class_with(InterpreterModule, [function]))
        for name, value in self.__dict__.items():
            if name != PRIVATE:
                form.__dict__[name] = value
        return form
