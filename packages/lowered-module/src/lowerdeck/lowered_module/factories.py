"""Import models, samples and partitioners named as ``MODULE:FACTORY`` on the command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch

from lowerdeck.lowered_module.authoring.declarative import DeclarativeBackend
from lowerdeck.lowered_module.authoring.registry import find_partitioner
from lowerdeck.lowered_module.errors import LoweringError, in_a_line
from lowerdeck.lowered_module.pipeline import Example, example_of
from lowerdeck.lowered_module.quantization import Sample

_OF_PARTITIONERS = ("__call__", "ops_to_not_decompose")
_Made = TypeVar("_Made")


def example_from(factory: str) -> Example:
    """Return the module or program and the example inputs that a factory returns.

    Args:
        factory: ``"package.module:function"``; the current folder is searched too.

    Raises:
        LoweringError: The function is missing, or returns another kind of object.
    """
    expected = (
        "expected a function without arguments that returns an ExportedProgram or (module, "
        "example_args), optionally with example_kwargs and dynamic_shapes"
    )
    return _call(
        factory,
        expected,
        lambda made_by_factory: example_of(made_by_factory, f"{factory!r} returned"),
    )


def samples_from(factory: str) -> list[Sample]:
    """Return the calibration inputs that a factory returns.

    Args:
        factory: ``"package.module:function"``; it returns or yields samples, each a tuple of
            inputs, a mapping of inputs by name, or the only input.

    Raises:
        LoweringError: The function is missing, or returns no samples.
    """
    expected = (
        "expected a function without arguments that returns or yields samples, each a tuple of "
        "inputs, a mapping by name, or the only input"
    )

    def listed(values: Any) -> list[Sample]:
        is_one = isinstance(values, torch.Tensor | Mapping | str)
        samples = [] if is_one or not isinstance(values, Iterable) else list(map(_sample, values))
        if not samples:
            count = "nothing" if isinstance(values, Iterable) and not is_one else ""
            raise LoweringError(
                f"--calibrate {factory!r} returned {count or f'a {type(values).__name__}'}, "
                f"{expected}"
            )
        return samples

    return _call(factory, expected, listed, "--calibrate ")


def partitioner_from(name: str) -> Any:
    """Return an installed partitioner, or a partitioner from any module.

    Args:
        name: Name of an installed partitioner, or ``"package.module:path"`` of a partitioner
            class, a function that returns a partitioner, an instance, or a ``DeclarativeBackend``.

    Raises:
        LoweringError: No partitioner has this name, it cannot be created without arguments, or the
            object is not a partitioner.
    """
    partitioner: Any
    try:
        if ":" not in name:
            partitioner = find_partitioner(name)
        else:
            expected = "the name of a backend, or MODULE:CLASS of a partitioner or backend"
            partitioner = _import_object(name, expected)
            is_class = isinstance(partitioner, type)
            if issubclass(partitioner if is_class else type(partitioner), DeclarativeBackend):
                partitioner = partitioner.partitioner
            # `Class`, `Class.partitioner` or an instance.
            if isinstance(partitioner, type) or not hasattr(partitioner, "ops_to_not_decompose"):
                partitioner = partitioner() if callable(partitioner) else partitioner
    except LoweringError:
        raise
    except ModuleNotFoundError as error:
        raise LoweringError(
            f"{name!r} needs the package {error.name!r}, which is not installed: "
            f"pip install {error.name}"
        ) from error
    except (Exception, SystemExit) as error:
        raise LoweringError(
            f"{name!r} cannot be created without arguments: {in_a_line(error)}; name an instance "
            "of the partitioner instead"
        ) from error
    missing = [part for part in _OF_PARTITIONERS if not callable(getattr(partitioner, part, None))]
    if missing:
        raise LoweringError(
            f"{name!r} is a {type(partitioner).__name__} without {' and '.join(missing)}, "
            "expected a partitioner: derive it from lowerdeck.lowered_module.Partitioner, or a "
            "DeclarativeBackend"
        )
    return partitioner


def _call(factory: str, expected: str, convert: Callable[[Any], _Made], option: str = "") -> _Made:
    """Return the converted result of a factory."""
    try:
        function = _import_object(factory, "MODULE:FACTORY, such as mymodel:example")
    except LoweringError as error:
        raise LoweringError(f"{option}{error}") from error
    if not callable(function):
        raise LoweringError(f"{option}{factory!r} is a {type(function).__name__}, {expected}")
    try:
        return convert(function())
    except LoweringError:
        raise
    except (Exception, SystemExit) as error:
        raise LoweringError(
            f"{option}{factory!r} raised {in_a_line(error)}; {expected}"
        ) from error


def _sample(value: Any) -> Sample:
    if isinstance(value, Mapping):
        return (), dict(value)
    return (tuple(value) if isinstance(value, tuple | list) else (value,)), {}


def _import_object(text: str, expected: str) -> Any:
    """Return the object named by ``"package.module:path"``."""
    module, _, path = text.partition(":")
    if not module or not path:
        raise LoweringError(f"found {text!r}, expected {expected}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        attribute: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        why = f": {in_a_line(error)}"
        if isinstance(error, ModuleNotFoundError):
            stem = Path(module).stem
            cure = "install it, or start the command in the folder that contains it"
            if module == f"{stem}.py":
                cure = f"give the module without .py: {stem}:{path}"
            why = f" ({error}): {cure}"
        raise LoweringError(f"module {module!r} of {text!r} cannot be imported{why}") from error
    try:
        return attrgetter(path)(attribute)
    except AttributeError as error:
        raise LoweringError(f"{text!r}: {error}") from error
