"""Fixtures of all tests of this package."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

with warnings.catch_warnings():
    # torchao and transformers warn about themselves while they are imported.
    warnings.simplefilter("ignore")
    from folders import save_folder

    import lowerdeck.language_models  # noqa: F401
    from lowerdeck_files.shell import shell

__all__ = ["shell"]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small llama in float32."""
    folder = tmp_path_factory.mktemp("llama")
    save_folder(folder)
    return folder
