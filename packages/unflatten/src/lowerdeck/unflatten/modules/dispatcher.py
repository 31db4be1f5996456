"""A submodule with several specializations, or with values besides its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import buffers_of, children_of, parameters_of
from lowerdeck.unflatten.attributes import FUNCTIONS, PRIVATE
from lowerdeck.unflatten.cut.graphs import EXTRA_INPUTS
from lowerdeck.unflatten.modules.body import Body
from lowerdeck.unflatten.modules.container import Container
from lowerdeck.unflatten.modules.module import InterpreterModule, class_with
from lowerdeck.unflatten.specializations import RUN, PendingCall


class InterpreterModuleDispatcher(InterpreterModule):
    """A submodule whose caller selects one of several specializations.

    The caller's code names the specialization, so calls may nest, run in threads and fail. A
    direct call is refused: call one of ``call_modules()``.
    """

    def call_modules(self) -> Sequence[InterpreterModule]:
        """Return all specializations in order of first use, each as a module that runs it alone.

        They share this module's state, children and hooks.
        """
        body: Body = self.__dict__[PRIVATE]
        functions = getattr(type(self), FUNCTIONS)
        return [
            _module_of(self, specialization, function)
            for specialization, function in zip(body.specializations, functions, strict=True)
        ]

    def __dir__(self) -> list[str]:
        # torch's own looks at the first letter of each name, and one name is empty.
        tables = (children_of(self), parameters_of(self), buffers_of(self))
        names = {*dir(type(self)), *self.__dict__, *(name for table in tables for name in table)}
        return sorted(name for name in names if name and not name[0].isdigit())


def _module_of(
    module: InterpreterModuleDispatcher, body: Body, function: Any
) -> InterpreterModule:
    own = replace(body, others=[], view=None)
    view: InterpreterModule = class_with(InterpreterModule, own, [function])(own)
    for name, value in module.__dict__.items():
        if name != PRIVATE:
            view.__dict__[name] = value
    return view


def _views(module: InterpreterModuleDispatcher) -> Container:
    """Return a container of the specializations, as children "0", "1" and so on."""
    views = Container()
    for number in range(len(module.__dict__[PRIVATE].specializations)):
        views.add_module(str(number), _GraphCall(module, number))
    return views


class _GraphCall(torch.nn.Module):
    """A graph's call of a specialization with extra values."""

    def __init__(self, module: torch.nn.Module, number: int) -> None:
        super().__init__()
        self.__dict__.update(called=module, number=number)

    def forward(self, /, *args: Any, **kwargs: Any) -> Any:
        module, number = self.__dict__["called"], self.__dict__["number"]
        body: Body = module.__dict__[PRIVATE]
        pending = PendingCall(body.name, number, tuple(kwargs.pop(EXTRA_INPUTS, ())))
        before, RUN.pending = RUN.pending, pending
        try:
            result = module(*args, **kwargs)
        finally:
            RUN.pending = before
        signature = body.specializations[number].signature
        has_more = signature is not None and signature.carries
        return (result, pending.extra_outputs) if has_more else result


# Graphs call a specialization by the path "step..1". Not by __getattr__: strict export then gives
# the module's parameters other names.
setattr(InterpreterModuleDispatcher, "", property(_views))
