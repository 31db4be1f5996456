"""Weights on their way to other processes: apart from the program, as bytes or in files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.program.copies import with_values
from lowerdeck.torch_base import bytes_of, storage_identity

# Below it, what tells where a weight is takes as much as the weight.
_SMALL = 1024
_Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class SentWeight:
    """One dense tensor of a program.

    Attributes:
        names: Where it belongs: ``state_dict`` or ``constants``, and the name there. Tied weights
            have several.
        dtype: Its dtype.
        shape: Its sizes; it is contiguous.
        parameter: Whether it is a parameter, and if so, whether it requires a gradient.
        data: Its bytes, or the file that they are in.
    """

    names: tuple[_Name, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    parameter: bool | None
    data: bytes | Path


def taken_out(program: ExportedProgram) -> tuple[ExportedProgram, tuple[SentWeight, ...]]:
    """Return a copy of ``program`` without its weights, and these.

    What is no plain dense tensor of some size, or shares its memory with another, stays in it.

    Args:
        program: A partition.
    """
    names: dict[int, list[_Name]] = {}
    tensors: dict[int, torch.Tensor] = {}
    users: dict[object, set[int]] = {}
    for kind in ("state_dict", "constants"):
        for name, value in getattr(program, kind).items():
            if isinstance(value, torch.Tensor):
                names.setdefault(id(value), []).append((kind, name))
                tensors[id(value)] = value
                users.setdefault(storage_identity(value), set()).add(id(value))
    chosen = {
        one: value
        for one, value in tensors.items()
        if _is_plain(value) and len(users[storage_identity(value)]) == 1
    }

    def emptied(values: dict[str, Any]) -> dict[str, Any]:
        return {n: _emptied(v) if id(v) in chosen else v for n, v in values.items()}

    sent = tuple(
        SentWeight(
            tuple(names[one]),
            value.dtype,
            tuple(value.shape),
            value.requires_grad if isinstance(value, torch.nn.Parameter) else None,
            bytes(bytes_of(value)),
        )
        for one, value in chosen.items()
    )
    return with_values(program, emptied), sent


def put_back(program: ExportedProgram, weights: tuple[SentWeight, ...]) -> None:
    """Give a program that was loaded its weights again.

    Args:
        program: The program, modified in place.
        weights: From ``taken_out``.

    Raises:
        PreprocessError: A file of weights cannot be read here.
    """
    for weight in weights:
        value = _flat(weight).view(weight.shape)
        if weight.parameter is not None:
            value = torch.nn.Parameter(value, requires_grad=weight.parameter)
        for kind, name in weight.names:
            getattr(program, kind)[name] = value


def _is_plain(value: torch.Tensor) -> bool:
    return (
        (
            type(value) is torch.nn.Parameter
            or (type(value) is torch.Tensor and not value.requires_grad)
        )
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.nbytes >= _SMALL
        and not value.is_quantized
        and value.is_contiguous()
        and not (value.is_conj() or value.is_neg())
    )


def _emptied(value: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=value.dtype)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=value.requires_grad)
    return empty


def _flat(weight: SentWeight) -> torch.Tensor:
    if isinstance(weight.data, bytes):
        # A backend may write to what it is given.
        return torch.frombuffer(bytearray(weight.data), dtype=weight.dtype)
    count = math.prod(weight.shape)
    try:
        return torch.from_file(str(weight.data), shared=False, size=count, dtype=weight.dtype)
    except RuntimeError as error:
        raise PreprocessError(
            f"a worker cannot read the weights at {str(weight.data)!r}: "
            f"{str(error).partition(chr(10))[0]}. Give SharedWeights a directory that all workers "
            "see under the same path, and shut it down after the last lowering"
        ) from error
