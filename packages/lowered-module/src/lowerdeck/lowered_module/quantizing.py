"""What ``lowerdeck lower --quantize`` does before it lowers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module.authoring.partitioner import Partitioner
from lowerdeck.lowered_module.authoring.quantization import (
    Quantization,
    Sample,
    find_quantization,
    quantization_names,
)
from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.lowered_module.inspect.float_weights import (
    FloatWeight,
    list_float_weights,
    why_not_quantized,
)
from lowerdeck.serializer import CommandError, ExitStatus


def chosen_quantization(
    mode: str, backends: Sequence[str], *, calibrate: bool
) -> tuple[str, str, Quantization]:
    """Return the first of some backends that can quantise, the mode, and what it offers.

    Args:
        mode: What ``--quantize`` says.
        backends: What ``--backend`` says.
        calibrate: Whether there are samples of inputs.

    Raises:
        CommandError: There is none, it lacks that mode, or the mode takes no samples.
    """
    installed = quantization_names()
    name = next((one for one in backends if one in installed), None)
    if name is None:
        raise CommandError(
            f"--quantize {mode} needs a --backend that quantises; installed are: "
            f"{', '.join(installed) or 'none'}. Others, such as OpenvinoBackend, take models that "
            "are quantised already: let MODULE:FACTORY return what PT2E's convert_pt2e made, and "
            "leave --quantize out",
            ExitStatus.USAGE,
        )
    offer = find_quantization(name)
    if mode not in offer.modes:
        known = ", ".join(f"{one} ({what})" for one, what in offer.modes.items())
        raise CommandError(
            f"{name} does not quantise by {mode!r}, but by {known}", ExitStatus.USAGE
        )
    if calibrate and mode not in offer.calibrated:
        raise CommandError(
            f"--quantize {mode} looks at no samples: leave --calibrate out", ExitStatus.USAGE
        )
    return name, mode, offer


def quantized(
    offer: Quantization,
    mode: str,
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    named: Mapping[str, Any],
    samples: Sequence[Sample],
) -> tuple[ExportedProgram, Partitioner]:
    """Return the quantised program of a model and the partitioner for it.

    Args:
        offer: What the backend offers.
        mode: One of its modes.
        module: The model.
        inputs: Its example inputs.
        named: Those that are given by name.
        samples: What to calibrate with.

    Raises:
        CommandError: Something is not installed that this needs.
        LoweringError: The model cannot be quantised, or the samples do not fit it.
    """
    try:
        return offer.quantize(mode, module, inputs, named, samples)
    except ModuleNotFoundError as error:
        raise CommandError(f"--quantize {mode}: {error}", ExitStatus.FAILED) from error
    except (Exception, SystemExit) as error:
        first = str(error).strip().partition("\n")[0]
        cure = ""
        if mode in offer.calibrated:
            cure = " do the model and the samples to calibrate with fit each other?"
        raise LoweringError(
            f"--quantize {mode} failed: {type(error).__name__}: {first};{cure} --debug shows where"
        ) from error


def float_weights(
    offer: Quantization, mode: str, program: ExportedProgram
) -> tuple[FloatWeight, ...]:
    """Return the weights of more than 1 kB that stay float in a quantised program, but no biases.

    Args:
        offer: What the backend offers.
        mode: One of its modes.
        program: What it made.
    """
    why_float = getattr(offer, "why_float", None)
    return list_float_weights(
        program, why_not_quantized if why_float is None else partial(why_float, mode)
    )


def samples_from(factory: str, made: Any) -> list[Sample]:
    """Return the inputs that a factory makes to calibrate with.

    Args:
        factory: Its name.
        made: What stands under that name: a function that returns or yields samples, each a tuple
            of inputs, a mapping of inputs given by name, or the only input.

    Raises:
        LoweringError: It is none, or makes none.
    """
    expected = (
        "expected a function without arguments that returns or yields samples: tuples of inputs"
    )
    if not callable(made):
        raise LoweringError(f"--calibrate {factory!r} is a {type(made).__name__}, {expected}")
    try:
        found = made()
        if isinstance(found, torch.Tensor | Mapping | str) or not isinstance(found, Iterable):
            raise LoweringError(
                f"--calibrate {factory!r} returned a {type(found).__name__}, {expected}"
            )
        samples = [_sample(one) for one in found]
    except LoweringError:
        raise
    except (Exception, SystemExit) as error:
        first = str(error).strip().partition("\n")[0]
        raise LoweringError(
            f"--calibrate {factory!r} raised {type(error).__name__}: {first}; {expected}"
        ) from error
    if not samples:
        raise LoweringError(f"--calibrate {factory!r} returned nothing, {expected}")
    return samples


def _sample(one: Any) -> Sample:
    if isinstance(one, Mapping):
        return (), dict(one)
    return (tuple(one) if isinstance(one, tuple | list) else (one,)), {}
