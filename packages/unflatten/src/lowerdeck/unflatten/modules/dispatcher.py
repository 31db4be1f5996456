"""A submodule whose calls compute different things, or read more than their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import buffers_of, children_of, parameters_of
from lowerdeck.unflatten.calls.carrying import CARRIED, PRIVATE
from lowerdeck.unflatten.calls.channel import carrying
from lowerdeck.unflatten.modules.container import Container
from lowerdeck.unflatten.modules.generated_module import (
    FUNCTIONS,
    Body,
    Function,
    class_with,
)
from lowerdeck.unflatten.modules.interpreter_module import InterpreterModule


class InterpreterModuleDispatcher(InterpreterModule):
    """A submodule whose caller tells how it is meant, most often as one of several forms.

    The caller's code names the form, so that nothing is counted: calls may nest, run in threads
    and fail. It hands over beside the call what is no argument, and gets so what is no result.
    A direct call runs the one form that was recorded with such arguments, and is refused where
    these do not tell.
    """

    def call_modules(self) -> Sequence[InterpreterModule]:
        """Return all forms in order of first use, each as a module that runs this form alone.

        They own nothing: they read this module's state, children and hooks.
        """
        held: Body = self.__dict__[PRIVATE]
        bodies = (held, *held.others)
        return [
            _form(self, body, function)
            for body, function in zip(bodies, _functions(type(self)), strict=True)
        ]

    def __dir__(self) -> list[str]:
        # torch's own looks at the first letter of each name.
        held = (children_of(self), parameters_of(self), buffers_of(self))
        names = {*dir(type(self)), *self.__dict__, *(name for each in held for name in each)}
        return sorted(name for name in names if name and not name[0].isdigit())


def _forms(module: InterpreterModuleDispatcher) -> Container:
    """Return what holds the forms of a module, as children "0", "1" and so on."""
    forms = Container()
    body: Body = module.__dict__[PRIVATE]
    for number, form in enumerate(module.call_modules()):
        told = (body, *body.others)[number].signature
        is_told = told is not None and told.is_told
        forms.add_module(str(number), _Carrying(module, number) if is_told else form)
    return forms


class _Carrying(torch.nn.Module):
    """Makes a graph's call of a module, with the values that the graph has beside arguments."""

    def __init__(self, module: torch.nn.Module, number: int) -> None:
        super().__init__()
        self.__dict__.update(called=module, number=number)

    def forward(self, /, *args: Any, **kwargs: Any) -> Any:
        called, number = self.__dict__["called"], self.__dict__["number"]
        body: Body = called.__dict__[PRIVATE]
        signature = (body, *body.others)[number].signature
        names = [f"value {index}" for index in range(signature.carries if signature else 0)]
        given, needs = kwargs.pop(CARRIED), signature.needs if signature else 0
        return carrying(called, body.keys[number], given, names, needs)(*args, **kwargs)


# Graphs call a form by the path "step..1". Not by __getattr__: strict export then gives
# the module's parameters other names.
setattr(InterpreterModuleDispatcher, "", property(_forms))


def _form(
    module: InterpreterModuleDispatcher, body: Body, function: Function
) -> InterpreterModule:
    own = replace(body, others=[], keys=(), view=None)
    form = InterpreterModule(
        own,
        class_with(InterpreterModule, [function], is_told=own.is_told, tells_flat=own.tells_flat),
    )
    for name, value in module.__dict__.items():
        if name != PRIVATE:
            form.__dict__[name] = value
    return form


def _functions(cls: type) -> Sequence[Function]:
    """Return the functions of all forms."""
    found: Sequence[Function] = getattr(cls, FUNCTIONS)
    return found
