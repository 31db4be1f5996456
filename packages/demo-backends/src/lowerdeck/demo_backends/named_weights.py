"""Weights in the file's named data: stored once by content, referred to by a line of text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import torch

from lowerdeck.demo_backends.errors import BlobError
from lowerdeck.serializer import NamedDataStore, NamedDataStoreOutput
from lowerdeck.torch_base import bytes_of, view_tensor

ALIGNMENT = 16
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}
_REFERENCE = re.compile(r"([0-9a-f]{64})/([a-z0-9]{4,8})/((?:\d{1,10}x)*\d{1,10}|scalar)")


class NamedWeights:
    """Collects the weights of one or several blobs.

    Equal bytes are stored once, whichever partition or method they come from: the key is their
    SHA-256.
    """

    def __init__(self) -> None:
        self._store = NamedDataStore()
        self._known: dict[int, tuple[torch.Tensor, str]] = {}

    def add(self, tensor: torch.Tensor) -> str:
        """Store a tensor's bytes.

        Args:
            tensor: A dense CPU tensor of a dtype that ``DTYPES`` names.

        Returns:
            The reference for the blob: ``KEY/DTYPE/SIZExSIZE``.

        Raises:
            BlobError: The dtype is none that a blob can name.
        """
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise BlobError(
                f"weights of {tensor.dtype} cannot be stored, only {', '.join(DTYPES)}"
            )
        shape = "x".join(str(size) for size in tensor.shape) or "scalar"
        return f"{self._key(tensor)}/{name}/{shape}"

    def output(self) -> NamedDataStoreOutput:
        """Return what ``PreprocessResult.data_store_output`` wants."""
        return self._store.get_named_data_store_output()

    def _key(self, tensor: torch.Tensor) -> str:
        # Kept with the tensor, so that no other tensor can come to have its id.
        known = self._known.get(id(tensor))
        if known is not None:
            return known[1]
        data = bytes_of(tensor)
        key = hashlib.sha256(data).hexdigest()
        self._store.add_named_data(key, data, alignment=ALIGNMENT)
        self._known[id(tensor)] = (tensor, key)
        return key


def read_weight(reference: str, named_data: Mapping[str, memoryview]) -> torch.Tensor:
    """Return the tensor that a reference means, as a view on the named data.

    Args:
        reference: What ``NamedWeights.add`` returned.
        named_data: The file's named data.

    Returns:
        A tensor that must not be written to.

    Raises:
        BlobError: The reference is malformed, its key is missing, or the entry's size does not
            fit the shape.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise BlobError(
            f"KEY/DTYPE/SIZExSIZE is needed to name a weight, found {reference[:80]!r}"
        )
    key, dtype, sizes = match.groups()
    if dtype not in DTYPES:
        raise BlobError(f"weight {key[:12]}... has the unknown dtype {dtype!r}")
    shape = [] if sizes == "scalar" else [int(size) for size in sizes.split("x")]
    if key not in named_data:
        raise BlobError(
            f"the named data has no entry {key}: was the blob taken out of its file, or is the "
            ".ptd missing that it came with?"
        )
    try:
        return view_tensor(named_data[key], DTYPES[dtype], shape)
    except ValueError as error:
        raise BlobError(f"named data {key[:12]}...: {error}") from error
