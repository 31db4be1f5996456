"""Export language models from Hugging Face folders, and generate text in the official runtime."""

from lowerdeck.language_models.decoder import CachedDecoder, export_decoder
from lowerdeck.language_models.errors import (
    FolderError,
    GenerationError,
    LanguageModelError,
    UnsupportedModelError,
)
from lowerdeck.language_models.exporting import export_language_model

__all__ = [
    "CachedDecoder",
    "FolderError",
    "GenerationError",
    "LanguageModelError",
    "UnsupportedModelError",
    "export_decoder",
    "export_language_model",
]
