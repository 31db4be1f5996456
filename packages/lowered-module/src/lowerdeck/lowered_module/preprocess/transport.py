"""Send a partition to another process, have it preprocessed there, and bring the result back."""

from __future__ import annotations

import io
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module.authoring.backend import PreprocessResult, with_plain_bytes
from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.program.pickling import dump_program, load_program
from lowerdeck.torch_base import bytes_of, storage_identity

# Below it, what tells where a weight is takes as much as the weight.
_SMALL = 1024


@dataclass(frozen=True, slots=True)
class SentWeight:
    """A dense tensor of a program that shares its memory with no other one.

    Attributes:
        dtype: Its dtype.
        shape: Its sizes; it is contiguous.
        parameter: Whether it is a parameter, and if so, whether it requires a gradient.
        data: Its bytes, or the file that they are in.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parameter: bool | None
    data: bytes | Path


@dataclass(frozen=True, slots=True)
class Parcel:
    """A partition as bytes.

    Attributes:
        program: The partition without its tensors.
        weights: Tensors by number, those that ``SharedWeights`` can send by another way.
        others: The other tensors by number, as ``torch.save`` writes them.
        backend: The backend class.
        compile_specs: What the backend is told.
    """

    program: bytes
    weights: dict[int, SentWeight]
    others: bytes
    backend: Any
    compile_specs: list[Any]


def pack(program: ExportedProgram, backend: Any, compile_specs: list[Any]) -> Parcel:
    """Return ``program`` ready to travel.

    Args:
        program: The partition.
        backend: Its backend class; the other side must be able to import it.
        compile_specs: What the backend is told.

    Raises:
        PreprocessError: The program holds what cannot be pickled.
    """
    tensors: list[torch.Tensor] = []
    others = io.BytesIO()
    try:
        content = dump_program(program, tensors)
        users = Counter(map(storage_identity, tensors))
        weights = {
            number: _sent(tensor)
            for number, tensor in enumerate(tensors)
            if _is_plain(tensor) and users[storage_identity(tensor)] == 1
        }
        left = {n: tensor for n, tensor in enumerate(tensors) if n not in weights}
        torch.save(left, others)
    except Exception as error:
        raise PreprocessError(
            f"a partition cannot be sent to an executor ({type(error).__name__}: {error}): lower "
            "without an executor"
        ) from error
    return Parcel(content, weights, others.getvalue(), backend, compile_specs)


def preprocess_parcel(parcel: Parcel) -> PreprocessResult:
    """Return what the backend makes of a parcel; runs in the other process.

    Args:
        parcel: From ``pack``.

    Raises:
        PreprocessError: The program or its weights cannot be read here.
        Exception: Whatever the backend raises.
    """
    found = {number: _tensor(weight) for number, weight in parcel.weights.items()}
    try:
        found |= torch.load(io.BytesIO(parcel.others), weights_only=True)
        program = load_program(parcel.program, [found[number] for number in range(len(found))])
    except Exception as error:
        raise PreprocessError(
            f"a worker cannot read a partition ({type(error).__name__}: {error}): use the same "
            "torch on both sides, or lower without an executor"
        ) from error
    return with_plain_bytes(parcel.backend.preprocess(program, parcel.compile_specs))


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


def _sent(value: torch.Tensor) -> SentWeight:
    parameter = value.requires_grad if isinstance(value, torch.nn.Parameter) else None
    return SentWeight(value.dtype, tuple(value.shape), parameter, bytes(bytes_of(value)))


def _tensor(weight: SentWeight) -> torch.Tensor:
    value = _flat(weight).view(weight.shape)
    if weight.parameter is None:
        return value
    return torch.nn.Parameter(value, requires_grad=weight.parameter)


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
