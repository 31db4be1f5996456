"""The ``.ptd`` file, and a model that lies in several files."""

from lowerdeck.serializer.ptd.external_read import PtdFile, deserialize_ptd, open_ptd
from lowerdeck.serializer.ptd.external_write import (
    ExternalData,
    ExternalEntry,
    external_data,
    serialize_ptd,
    write_ptd,
)
from lowerdeck.serializer.ptd.model_files import OpenModel, open_model, write_model

__all__ = [
    "ExternalData",
    "ExternalEntry",
    "OpenModel",
    "PtdFile",
    "deserialize_ptd",
    "external_data",
    "open_model",
    "open_ptd",
    "serialize_ptd",
    "write_model",
    "write_ptd",
]
