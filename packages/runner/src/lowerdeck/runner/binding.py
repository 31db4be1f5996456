"""Find and load the Python binding of the official ExecuTorch runtime."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

_PACKAGE = "executorch.extension.pybindings"
_NAMES = ("_C", "_portable_lib")  # from 1.5; before
_OPENVINO = "OPENVINO_LIB_PATH"


def official_binding_name() -> str | None:
    """Return the name of ExecuTorch's binding module, or None; the module is not imported.

    Example:
        >>> from lowerdeck.runner import official_binding_name
        >>> official_binding_name()  # doctest: +SKIP
        'executorch.extension.pybindings._portable_lib'
    """
    for name in _NAMES:
        try:
            if importlib.util.find_spec(f"{_PACKAGE}.{name}") is not None:
                return f"{_PACKAGE}.{name}"
        except (ImportError, ValueError):
            return None
    return None


def official_binding() -> dict[str, Any]:
    """Return ExecuTorch's binding module as a dict, after locating OpenVINO's library.

    Call it in a separate process: the runtime aborts on some files and registers its operators
    with torch. All names in the binding are private to ExecuTorch; its public module
    ``portable_lib`` imports all of exir.

    Raises:
        ModuleNotFoundError: executorch is not installed.

    Example:
        >>> from lowerdeck.runner import official_binding
        >>> load = official_binding()["_load_for_executorch"]  # doctest: +SKIP
    """
    name = official_binding_name()
    if name is None:
        raise ModuleNotFoundError("executorch is not installed: pip install --no-deps executorch")
    # The binding is linked to torch's libraries, which must be loaded first.
    importlib.import_module("torch")
    if library := _openvino_library():
        os.environ.setdefault(_OPENVINO, str(library))
    return vars(importlib.import_module(name))


def _openvino_library() -> Path | None:
    """Return the path of OpenVINO's C library, which the runtime's backend loads at first use."""
    spec = importlib.util.find_spec("openvino")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for library in sorted(Path(folder, "libs").glob("libopenvino_c.*")):
            return library
    return None
