"""A small model with inputs, and its programs: exported once a process in each way."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram, export

from lowerdeck.unflatten import UnflattenedModule, export_preserving, unflatten
from lowerdeck_zoo import Program, saved_and_loaded

WAYS = ("plain", "strict", "decomposed", "saved", "functional", "flat", "preserving")
"""Ways to a program that every case goes."""

MORE_WAYS = ("strict decomposed", "preserving decomposed", "preserving saved")
"""Ways of which each of our own models goes two."""


class Named(dict[str, Any]):
    """Keyword arguments: the last of the inputs of a case."""


class Inputs(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """A model and how it may be used; nothing is built before it is asked for.

    Attributes:
        draw: Returns the arguments of one call; takes the numbers of ``sizes``.
        sizes: The numbers of each call; the first call is exported.
        shapes: The dynamic shapes, as ``torch.export.export`` takes them.
        training: Whether the model is exported in training mode.
        marked: The modules that have no recorded call or signature in ``export_preserving``.
        without: What does not apply, separated by commas: ways that torch's own export cannot go,
            and judges.
        tolerance: Largest absolute and relative error; None takes that of ``assert_close``.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[..., tuple[Any, ...]]
    sizes: tuple[tuple[int, ...], ...] = ((), ())
    shapes: Any = None
    training: bool = False
    marked: tuple[str, ...] = ()
    without: str = ""
    tolerance: float | None = None

    def __str__(self) -> str:
        return self.name

    def lacks(self, name: str) -> bool:
        """Return whether a way or judge does not apply."""
        names = self.without.split(", ")
        is_decomposed = name.endswith("decomposed") or name == "functional"
        return name in names or (is_decomposed and "decomposed" in names)

    def module(self) -> nn.Module:
        """Return the model in its initial state, a copy each time."""
        return copy.deepcopy(_built(self)[0])

    def calls(self) -> list[Inputs]:
        """Return the arguments of each call, copies each time."""
        return copy.deepcopy(_built(self)[1])

    def program(self, way: str = "plain") -> ExportedProgram:
        """Return the program of a way; do not mutate it."""
        return _program(self, way)

    def unflattened(self, way: str = "plain") -> UnflattenedModule:
        """Return a new unflattened module of the program of a way."""
        options: dict[str, Any] = {}
        if way == "functional":
            way, options["inplace"] = "decomposed", False
        if way == "flat":
            way, options["preserve"] = "plain", "all"
        program = self.program(way)
        with warnings.catch_warnings():
            # Decomposing loses signatures, of which unflatten warns.
            warnings.simplefilter("ignore" if "decomposed" in way else "default")
            return unflatten(program, **options)


def of_program(program: Program, **facts: Any) -> Case:
    """Return a program of the zoo as a case."""
    calls = program.calls
    sizes = tuple((number,) for number in range(2))
    draw = lambda number: calls()[number].args  # noqa: E731
    facts = {
        "tolerance": max(program.atol, program.rtol),
        "shapes": program.dynamic_shapes,
        **facts,
    }
    return Case(str(program), program.module, draw, sizes, **facts)


@cache
def _built(case: Case) -> tuple[nn.Module, list[Inputs]]:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = case.build().train(case.training)
        drawn = [case.draw(*sizes) for sizes in case.sizes]
    calls = [
        Inputs(args[:-1], dict(args[-1]))
        if args and isinstance(args[-1], Named)
        else Inputs(args, {})
        for args in drawn
    ]
    return model, calls


@cache
def _program(case: Case, way: str) -> ExportedProgram:
    first, _, last = way.rpartition(" ")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if last == "decomposed":
            decomposed: ExportedProgram = case.program(first or "plain").run_decompositions()
            return decomposed
        if last == "saved":
            return saved_and_loaded(case.program(first or "plain"))
        args, kwargs = case.calls()[0]
        record = export_preserving if "preserving" in way else export
        return record(
            case.module(), args, kwargs, dynamic_shapes=case.shapes, strict="strict" in way
        )
