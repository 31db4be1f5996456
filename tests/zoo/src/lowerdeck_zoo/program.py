"""Named test programs: how to build, call and export them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from lowerdeck_zoo.checking import assert_close, assert_close_within_steps

Inputs = Callable[[], list[tuple[Any, ...]]]


class Call(NamedTuple):
    """One call of a program.

    Attributes:
        method: The method that is called.
        args: Its arguments, as nested as eager takes them.
    """

    method: str
    args: tuple[Any, ...]

    @property
    def flat(self) -> list[Any]:
        """The inputs as a file numbers them."""
        return pytree.tree_leaves(self.args)


class Result(NamedTuple):
    """What eager computes in one call.

    Attributes:
        outputs: The flat outputs.
        inputs: The flat inputs after the call: some programs write them.
    """

    outputs: list[Any]
    inputs: list[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A test program; nothing is built before it is asked for.

    ``export``, ``calls`` and ``results`` compute once per process: never mutate what ``export``
    returns (``export_anew`` and ``copied`` give programs to mutate). All is drawn from one seed.

    Attributes:
        name: The test ID.
        build: Returns the module.
        inputs: Returns the arguments of at least three calls, the first of which export traces.
            With several methods each begins with the name of its method.
        dynamic_shapes: As torch.export takes them; with several methods, by method.
        tags: Keys of ``TAGS``, separated by blanks.
        atol: Largest absolute error against eager.
        rtol: Largest relative error.
        step: With quantised values the share of elements that may be off by one step, which
            rounding may put on the other side: others must be within ``atol``.
        methods: The methods that are exported; they share the module's state.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    dynamic_shapes: Any = None
    tags: str = ""
    atol: float = 1e-4
    rtol: float = 1e-3
    step: float = 0.0
    methods: tuple[str, ...] = ("forward",)

    def __str__(self) -> str:
        return self.name

    def has(self, tags: str) -> bool:
        """Return whether the program has all of these tags, which are separated by blanks."""
        return set(tags.split()) <= set(self.tags.split())

    @property
    def has_usual_bounds(self) -> bool:
        """Whether ``atol`` and ``rtol`` have their default values."""
        return (self.atol, self.rtol) == (1e-4, 1e-3)

    def module(self) -> nn.Module:
        """Return the eager module in its initial state, a copy each time."""
        return copy.deepcopy(_built(self)[0])

    def calls(self) -> list[Call]:
        """Return the calls, with copies of their arguments each time."""
        return copy.deepcopy(_built(self)[1])

    def export(self, method: str = "") -> ExportedProgram:
        """Return the exported program of ``method`` (the first by default); do not mutate it."""
        return self.exports()[method or self.methods[0]]

    def exports(self) -> dict[str, ExportedProgram]:
        """Return the exported program of each method; do not mutate them."""
        return dict(_exported(self))

    def export_anew(self, method: str = "") -> ExportedProgram:
        """Return a newly exported program, for tests that mutate it."""
        return _export(self, self.module(), method or self.methods[0])

    def results(self) -> list[Result]:
        """Return what eager computes in each call, in order, from the initial state."""
        return _results(self)

    def compare(self, found: Any, expected: Any) -> None:
        """Raise AssertionError unless values are within the program's tolerance of eager's.

        Args:
            found: A tree of values.
            expected: The same of ``results``.
        """
        if self.step:
            assert_close_within_steps(found, expected, share=self.step)
        else:
            assert_close(found, expected, atol=self.atol, rtol=self.rtol)


@cache
def _built(program: Program) -> tuple[nn.Module, list[Call]]:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        module = program.build().eval()
        inputs = program.inputs()
    if len(program.methods) > 1:
        return module, [Call(name, tuple(args)) for name, *args in inputs]
    return module, [Call(program.methods[0], args) for args in inputs]


@cache
def _exported(program: Program) -> dict[str, ExportedProgram]:
    module, _ = _built(program)
    return {method: _export(program, module, method) for method in program.methods}


def _export(program: Program, module: nn.Module, method: str) -> ExportedProgram:
    example = next(call.args for call in program.calls() if call.method == method)
    shapes = program.dynamic_shapes
    if len(program.methods) > 1 and shapes is not None:
        shapes = shapes.get(method)
    if method != "forward":
        module = Method(module, method)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module, example, dynamic_shapes=shapes)


@cache
def _results(program: Program) -> list[Result]:
    module, results = program.module(), []
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for call in program.calls():
            outputs = getattr(module, call.method)(*call.args)
            # Copies: later calls may write what an output shares memory with.
            results.append(Result(*copy.deepcopy((pytree.tree_leaves(outputs), call.flat))))
    return results


def copied(program: ExportedProgram) -> ExportedProgram:
    """Return a copy of an exported program that shares its weights, state and constants."""
    tensors = [*program.state_dict.values(), *program.constants.values()]
    return copy.deepcopy(program, {id(tensor): tensor for tensor in tensors})


class Method(nn.Module):
    """A module whose forward is another method of ``module``."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *args: Any) -> Any:
        return getattr(self.module, self.method)(*args)


class Of(nn.Module):
    """A module that is one function of its inputs, and of itself if it has layers or buffers."""

    def __init__(self, function: Callable[..., Any], **held: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            else:
                self.register_buffer(name, value)
        self.takes_self = bool(held)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args) if self.takes_self else self.function(*args)


class Holding(nn.Module):
    """A module with the layers, parameters and buffers that its class names, made anew for each.

    class Counter(Holding, count=lambda: torch.zeros(2)): ...
    """

    _made: ClassVar[dict[str, Callable[[], nn.Module | torch.Tensor]]] = {}

    def __init_subclass__(cls, **made: Callable[[], nn.Module | torch.Tensor]) -> None:
        super().__init_subclass__()
        cls._made = {**cls._made, **made}

    def __init__(self) -> None:
        super().__init__()
        for name, make in self._made.items():
            value = make()
            if isinstance(value, nn.Module | nn.Parameter):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def together(*functions: Callable[..., Any]) -> Callable[[], nn.Module]:
    """Return a maker of a module that returns what each function makes of its inputs."""
    return lambda: Of(lambda *args: [function(*args) for function in functions])


def normal(*sizes: int, repeat: int = 3) -> Inputs:
    """Return a maker of ``repeat`` calls, each with one standard normal input of these sizes."""
    return lambda: [(torch.randn(*sizes),) for _ in range(repeat)]


def drawn(make: Callable[[], tuple[Any, ...]], repeat: int = 3) -> Inputs:
    """Return a maker of ``repeat`` calls, each with arguments that ``make`` returns."""
    return lambda: [make() for _ in range(repeat)]
