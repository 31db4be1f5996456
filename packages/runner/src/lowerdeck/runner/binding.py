"""Find and load the Python binding of the official ExecuTorch runtime."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

_PACKAGE = "executorch.extension.pybindings"
_NAMES = ("_C", "_portable_lib")  # from 1.5 on, and before
_OPENVINO = "OPENVINO_LIB_PATH"


def official_binding_name() -> str | None:
    """Return the name of the module with ExecuTorch's binding of its runtime, None without one.

    It is not loaded.

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
    """Return what ExecuTorch's binding of its runtime offers, by name, OpenVINO's library found.

    Load it in a separate process: the runtime ends its process over some files, and its
    operators are torch's from then on. The names in it are private, and all that there is. The
    module that ExecuTorch shows its users (``portable_lib``) imports all of exir for the class of
    one warning: 6 s in place of 0.2 s, and nothing at all where a dependency of exir is missing.

    Raises:
        ModuleNotFoundError: It is not installed.

    Example:
        >>> from lowerdeck.runner import official_binding
        >>> load = official_binding()["_load_for_executorch"]  # doctest: +SKIP
    """
    name = official_binding_name()
    if name is None:
        raise ModuleNotFoundError("executorch is not installed: pip install executorch")
    # The binding is linked to torch's libraries, which must be in the process.
    importlib.import_module("torch")
    if sys.platform == "win32":
        # There that module also adds the directories of the binding's libraries.
        return vars(importlib.import_module(f"{_PACKAGE}.portable_lib"))
    if library := _openvino_library():
        os.environ.setdefault(_OPENVINO, str(library))
    return vars(importlib.import_module(name))


def _openvino_library() -> Path | None:
    """Return the path of OpenVINO's C library, which its backend loads at first use."""
    spec = importlib.util.find_spec("openvino")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for library in sorted(Path(folder, "libs").glob("libopenvino_c.*")):
            return library
    return None
