"""Quantisation with a backend, for ``lowerdeck lower --quantize``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.export import ExportedProgram

from lowerdeck.inspect import CommandError, ExitStatus, installed_entries
from lowerdeck.lowered_module.authoring.partitioner import Partitioner
from lowerdeck.lowered_module.authoring.registry import only_entry
from lowerdeck.lowered_module.errors import LoweringError, in_a_line
from lowerdeck.lowered_module.inspect.float_weights import (
    FloatWeight,
    list_float_weights,
    why_not_quantized,
)

if TYPE_CHECKING:
    from lowerdeck.lowered_module.pipeline import Example

QUANTIZATIONS = "lowerdeck.quantizations"
Sample = tuple[tuple[Any, ...], dict[str, Any]]


class Quantization(Protocol):
    """Protocol of a backend's quantisation, for ``lowerdeck lower --quantize``.

    Distributions register a class in the entry-point group ``lowerdeck.quantizations`` under the
    name of the backend; it is created without arguments.

    Attributes:
        modes: Description of each mode by name.
        calibrated: Names of the modes that are calibrated with samples.

    For ``--dynamic`` or a factory with ``dynamic_shapes``, ``quantize`` is called with a keyword
    argument ``dynamic_shapes``, as for ``torch.export.export``.

    A class may also have a method ``why_float(mode, node)`` that returns why the weight read by a
    node of the quantised program stays float, or None if the mode does not quantise it.
    """

    modes: Mapping[str, str]
    calibrated: Collection[str]

    def quantize(
        self,
        mode: str,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        samples: Sequence[Sample],
    ) -> tuple[ExportedProgram, Partitioner]:
        """Return a quantised program of a model, and the partitioner for it.

        Args:
            module: The model, in evaluation mode; it is not changed.
            kwargs: Example inputs by name.
            samples: Calibration inputs: args and kwargs of each call.

        Raises:
            ModuleNotFoundError: A package is missing; the message names it.
        """
        ...


def quantization_names() -> list[str]:
    """Return the sorted names of backends with quantisation, without importing any."""
    return sorted({entry.name for entry in installed_entries(QUANTIZATIONS)})


def find_quantization(name: str) -> Quantization:
    """Return the quantisation of the backend called ``name``.

    Args:
        name: Name of the backend, an entry point in the group ``lowerdeck.quantizations``.

    Raises:
        BackendNotFoundError: No installed distribution registers it.
        AmbiguousBackendError: Several distributions register different ones.
    """
    entry = only_entry(QUANTIZATIONS, name, f"{name!r} has no quantisation")
    quantization: Quantization = entry.load()()
    return quantization


def find_offer(
    mode: str, backends: Sequence[str], *, has_samples: bool
) -> tuple[str, Quantization]:
    """Return the name and quantisation of the first backend that has one.

    Args:
        mode: The value of ``--quantize``.
        backends: The values of ``--backend``.
        has_samples: Whether there are calibration samples.

    Raises:
        CommandError: No backend has a quantisation, the quantisation lacks the mode, or there are
            samples for a mode without calibration.
    """
    installed = quantization_names()
    name = next((backend for backend in backends if backend in installed), None)
    if name is None:
        raise CommandError(
            f"--quantize {mode} needs a --backend with quantisation; installed: "
            f"{', '.join(installed) or 'none'}. Others, such as OpenvinoBackend, support models "
            "that are already quantised: let MODULE:FACTORY return the result of PT2E's "
            "convert_pt2e, and omit --quantize",
            ExitStatus.USAGE,
        )
    offer = find_quantization(name)
    if mode not in offer.modes:
        modes = ", ".join(f"{key} ({meaning})" for key, meaning in offer.modes.items())
        raise CommandError(
            f"found the mode {mode!r}, expected a mode of {name}: {modes}", ExitStatus.USAGE
        )
    if has_samples and mode not in offer.calibrated:
        raise CommandError(
            f"--quantize {mode} uses no samples: omit --calibrate", ExitStatus.USAGE
        )
    return name, offer


def quantize(
    offer: Quantization, mode: str, model: Example, samples: Sequence[Sample]
) -> tuple[ExportedProgram, Partitioner]:
    """Quantise a model; return the program and its partitioner.

    Args:
        samples: Calibration samples; the example inputs if empty.

    Raises:
        CommandError: A required package is missing, or the model is an exported program.
        LoweringError: The model cannot be quantised, or fails on the samples.
    """
    if model.program is not None:
        raise CommandError(
            "--quantize needs a module, but the factory returned an ExportedProgram: let it "
            "return (module, example_args)",
            ExitStatus.USAGE,
        )
    inputs = model.args, model.kwargs
    try:
        shapes = {} if model.dynamic_shapes is None else {"dynamic_shapes": model.dynamic_shapes}
        return offer.quantize(mode, model.module, *inputs, samples or [inputs], **shapes)
    except ModuleNotFoundError as error:
        raise CommandError(f"--quantize {mode}: {error}", ExitStatus.FAILED) from error
    except (Exception, SystemExit) as error:
        cure = " do the samples of --calibrate fit the model?" if samples else ""
        raise LoweringError(
            f"--quantize {mode} failed: {in_a_line(error)};{cure} --debug shows where"
        ) from error


def float_weights(
    offer: Quantization, mode: str, program: ExportedProgram
) -> tuple[FloatWeight, ...]:
    """Return the float weights of more than 1 kB in a quantised program, without biases."""
    why_float = getattr(offer, "why_float", None)
    return list_float_weights(
        program, why_not_quantized if why_float is None else partial(why_float, mode)
    )
