"""Tensors on the bytes of the program, its ``.ptd`` file or an arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from lowerdeck.runner.errors import ProgramError
from lowerdeck.runner.values.arena import Arena, require_memory, strides_of
from lowerdeck.runner.values.tensors import Origin, TensorSpec
from lowerdeck.serializer import (
    FileRange,
    Program,
    SerializerError,
    Storage,
    TensorDataLocation,
    TensorLayout,
    resident_view,
)
from lowerdeck.serializer import Tensor as TensorValue
from lowerdeck.torch_base import DTYPES


def as_view(storage: Storage) -> memoryview:
    """Return the bytes of ``storage`` without a copy.

    Args:
        storage: A buffer, or a range of a file, which is memory-mapped.

    Raises:
        ProgramError: The file cannot be read, or is shorter than the range.
    """
    try:
        return storage.map() if isinstance(storage, FileRange) else resident_view(storage)
    except (OSError, SerializerError) as error:
        raise ProgramError(f"the bytes of a file cannot be read: {error}") from error


class ExternalTensor(NamedTuple):
    """Tensor or blob outside of the program.

    Attributes:
        layout: Dtype, shape and dim order, if known.
        from_file: Whether it comes from a ``.ptd``, which records the layout of every tensor.
    """

    data: memoryview
    layout: TensorLayout | None = None
    from_file: bool = False


class ProgramData:
    """Provider of the constants and initial values of a program.

    Args:
        external: Tensors of the ``.ptd`` by name.
    """

    def __init__(self, program: Program, external: Mapping[str, ExternalTensor]) -> None:
        self._program = program
        self._external = external

    def constant(self, index: int) -> memoryview:
        """Return the bytes of the constant ``index``.

        Raises:
            ProgramError: The file has fewer constants.
        """
        buffers = self._program.constant_buffer
        if not 0 < index < len(buffers):
            raise ProgramError(f"constant {index} is missing; the file has {len(buffers) - 1}")
        return as_view(buffers[index].storage)

    def initial(self, index: int) -> memoryview:
        """Return the bytes of the initial value ``index`` of a mutable buffer.

        Raises:
            ProgramError: The file has fewer initial values.
        """
        buffers = self._program.mutable_data
        if not 0 < index < len(buffers):
            raise ProgramError(
                f"initial value {index} is missing; the file has {len(buffers) - 1}"
            )
        return as_view(buffers[index].storage)

    def external(self, name: str, spec: TensorSpec) -> memoryview:
        """Return the bytes of the external tensor ``name``.

        Raises:
            ProgramError: The external data lacks the tensor, or has it as a blob or with another
                dtype, shape or dim order.
        """
        if name not in self._external:
            others = (
                f"{len(self._external)} other tensors" if self._external else "no external data"
            )
            raise ProgramError(
                f"value {spec.index} needs the external tensor {name!r}; {others} given: "
                "pass the .ptd as load(..., data=path)"
            )
        tensor = self._external[name]
        if tensor.layout is None and tensor.from_file:
            raise ProgramError(f"the external data contains {name!r} as a blob, not as a tensor")
        if tensor.layout is not None:
            _check_layout(name, tensor.layout, spec)
        return tensor.data

    def named(self) -> dict[str, memoryview]:
        """Return the named data of delegates, from the program and from the external data.

        Raises:
            ProgramError: A key occurs in both.
        """
        blobs = {item.key: as_view(item.data) for item in self._program.named_data}
        for key, tensor in self._external.items():
            if key in blobs:
                raise ProgramError(f"both the program and the external data contain {key!r}")
            blobs[key] = tensor.data
        return blobs


def _check_layout(name: str, layout: TensorLayout, spec: TensorSpec) -> None:
    """Reject an external tensor that does not match its spec."""
    actual = (DTYPES.get(layout.scalar_type), tuple(layout.sizes), tuple(layout.dim_order))
    if actual != (spec.dtype, spec.sizes, spec.dim_order):
        raise ProgramError(
            f"the external tensor {name!r} is {actual[0]} of shape {list(actual[1])} and dim "
            f"order {list(actual[2])}; the program expects {spec.dtype}, {list(spec.sizes)}, "
            f"{list(spec.dim_order)}"
        )


def make_tensor(
    spec: TensorSpec, value: TensorValue, arenas: Sequence[Arena], source: ProgramData
) -> torch.Tensor:
    """Return a tensor: a view of its arena or constant, or new memory for one of the caller.

    Raises:
        ProgramError: Memory cannot be allocated, or the bytes are missing, too few or outside of
            their arena.
    """
    extra = value.extra_tensor_info
    external = extra is not None and extra.location == TensorDataLocation.EXTERNAL
    if spec.origin is Origin.CALLER:
        require_memory(spec.nbytes, f"value {spec.index}")
        try:
            return torch.zeros(spec.capacity, dtype=spec.dtype).as_strided(
                spec.sizes, strides_of(spec.sizes, spec.dim_order)
            )
        except RuntimeError as error:
            raise ProgramError(
                f"cannot allocate value {spec.index} of shape {list(spec.sizes)}: {error}"
            ) from error
    data: memoryview | None = None
    if external:
        data = source.external(spec.name, spec)
    elif value.data_buffer_idx > 0:
        planned = spec.origin is Origin.PLANNED
        data = (source.initial if planned else source.constant)(value.data_buffer_idx)
    if spec.origin is Origin.CONSTANT:
        return _from_bytes(spec, data if data is not None else memoryview(b""))
    if not 0 < spec.memory_id < len(arenas):
        raise ProgramError(
            f"value {spec.index} has memory id {spec.memory_id}, but the method has "
            f"{len(arenas) - 1} planned memories (ids start at 1)"
        )
    arena = arenas[spec.memory_id]
    tensor = arena.view(spec.dtype, spec.sizes, spec.dim_order, spec.offset)
    if data is not None and spec.offset not in arena.initialised:
        tensor.copy_(_from_bytes(spec, data))
        arena.initialised.add(spec.offset)
    return tensor


def _from_bytes(spec: TensorSpec, data: memoryview) -> torch.Tensor:
    """Return a tensor on ``data`` without a copy."""
    if data.nbytes < spec.nbytes:
        raise ProgramError(
            f"value {spec.index} of shape {list(spec.sizes)} needs {spec.nbytes} bytes; "
            f"the file has {data.nbytes} for it"
        )
    strides = strides_of(spec.sizes, spec.dim_order)
    if spec.capacity == 0:
        return torch.empty(0, dtype=spec.dtype).as_strided(spec.sizes, strides)
    flat = torch.frombuffer(data, dtype=spec.dtype, count=spec.capacity)
    return flat.as_strided(spec.sizes, strides)
