"""Quantisation that a backend offers, and its use by the command."""

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
    """The ways in which a backend quantises models, for ``lowerdeck lower --quantize``.

    A distribution offers it as an entry point in the group ``lowerdeck.quantizations``, under the
    name of its backend: a class that is made without arguments.

    Attributes:
        modes: What each way does, by name.
        calibrated: Those that look at samples of inputs.

    A class may also have a method ``why_float(mode, node)``: it returns why the weight that a node
    of the quantised program reads stays float, or None where the mode keeps floats.
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
            kwargs: Example inputs that are given by name.
            samples: Inputs to calibrate with, positional ones and those by name.

        Raises:
            ModuleNotFoundError: Something has to be installed; the message says what.
        """
        ...


def quantization_names() -> list[str]:
    """Return the sorted names of the backends that offer to quantise, without loading any."""
    return sorted({entry.name for entry in installed_entries(QUANTIZATIONS)})


def find_quantization(name: str) -> Quantization:
    """Return what the backend called ``name`` offers to quantise with.

    Args:
        name: Name of an entry point in the group ``lowerdeck.quantizations``: the backend's.

    Raises:
        BackendNotFoundError: No distribution offers it.
        AmbiguousBackendError: Several distributions offer different ones.
    """
    entry = only_entry(QUANTIZATIONS, name, f"{name!r} does not quantise")
    quantization: Quantization = entry.load()()
    return quantization


def find_offer(
    mode: str, backends: Sequence[str], *, has_samples: bool
) -> tuple[str, Quantization]:
    """Return the name and the offer of the first of some backends that can quantise.

    Args:
        mode: The value of ``--quantize``.
        backends: The values of ``--backend``.
        has_samples: Whether there are samples of inputs.

    Raises:
        CommandError: There is none, it lacks that mode, or the mode takes no samples.
    """
    installed = quantization_names()
    name = next((one for one in backends if one in installed), None)
    if name is None:
        raise CommandError(
            f"--quantize {mode} needs a --backend that quantises; installed are: "
            f"{', '.join(installed) or 'none'}. Others, such as OpenvinoBackend, take models "
            "that are quantised already: let MODULE:FACTORY return what PT2E's convert_pt2e "
            "made, and leave --quantize out",
            ExitStatus.USAGE,
        )
    offer = find_quantization(name)
    if mode not in offer.modes:
        modes = ", ".join(f"{one} ({meaning})" for one, meaning in offer.modes.items())
        raise CommandError(
            f"{name} does not quantise by {mode!r}, but by {modes}", ExitStatus.USAGE
        )
    if has_samples and mode not in offer.calibrated:
        raise CommandError(
            f"--quantize {mode} looks at no samples: leave --calibrate out", ExitStatus.USAGE
        )
    return name, offer


def quantize(
    offer: Quantization, mode: str, model: Example, samples: Sequence[Sample]
) -> tuple[ExportedProgram, Partitioner]:
    """Return the quantised program of a model and the partitioner for it.

    Args:
        offer: What the backend offers.
        mode: One of its modes.
        model: The model with its example inputs.
        samples: What to calibrate with; the example inputs if there are none.

    Raises:
        CommandError: Something is not installed that this needs.
        LoweringError: The model cannot be quantised, or the samples do not fit it.
    """
    if model.program is not None:
        raise CommandError(
            "--quantize needs a module, and the factory returned an ExportedProgram: let it "
            "return (module, example_args)",
            ExitStatus.USAGE,
        )
    inputs = model.args, model.kwargs
    try:
        return offer.quantize(mode, model.module, *inputs, samples or [inputs])
    except ModuleNotFoundError as error:
        raise CommandError(f"--quantize {mode}: {error}", ExitStatus.FAILED) from error
    except (Exception, SystemExit) as error:
        is_calibrated = mode in offer.calibrated
        cure = " do the model and the samples to calibrate with fit each other?"
        raise LoweringError(
            f"--quantize {mode} failed: {in_a_line(error)};"
            f"{cure if is_calibrated else ''} --debug shows where"
        ) from error


def float_weights(
    offer: Quantization, mode: str, program: ExportedProgram
) -> tuple[FloatWeight, ...]:
    """Return the weights of more than 1 kB that stay float in a quantised program, but no biases.

    Args:
        offer: What the backend offers.
        mode: One of its modes.
    """
    why_float = getattr(offer, "why_float", None)
    return list_float_weights(
        program, why_not_quantized if why_float is None else partial(why_float, mode)
    )
