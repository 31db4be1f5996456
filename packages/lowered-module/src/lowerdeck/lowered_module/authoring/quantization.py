"""What a backend offers that can quantise models by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.export import ExportedProgram

from lowerdeck.inspect import installed_entries
from lowerdeck.lowered_module.authoring.partitioner import Partitioner
from lowerdeck.lowered_module.authoring.registry import only_entry

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
            mode: One of ``modes``.
            module: The model, in evaluation mode; it is not changed.
            args: Example inputs.
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
    made: Quantization = entry.load()()
    return made
