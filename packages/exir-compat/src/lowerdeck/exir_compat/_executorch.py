"""References to ExecuTorch's modules.

ExecuTorch's modules are looked up in ``sys.modules`` at each use, because code that uses exir's
classes has imported them. Only ``new_record`` imports an ExecuTorch module.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from lowerdeck.exir_compat.errors import SettingError

_PROGRAMS = "executorch.exir.program._program"
_SCHEMA = "executorch.exir.schema"
_RECORDS = "executorch.devtools.etrecord"


def manager_class(name: str) -> Any:
    """Return exir's manager class called ``name``, or None if exir is not loaded."""
    return getattr(sys.modules.get(_PROGRAMS), name, None)


def file_classes() -> Any:
    """Return exir's schema module, or None if it is not loaded."""
    return sys.modules.get(_SCHEMA)


def quantized_fusions() -> Any:
    """Return exir's pass that fuses quantized operators.

    Raises:
        SettingError: exir is not loaded.
    """
    try:
        return sys.modules[_PROGRAMS].quant_fusion_and_const_prop_pass
    except KeyError:
        raise SettingError(
            "ExecutorchBackendConfig.do_quant_fusion_and_const_prop needs executorch.exir: "
            "import it, or remove the setting"
        ) from None


def is_from_executorch(kind: object) -> bool:
    """Return whether ``kind``, or the class of ``kind``, is defined in ExecuTorch."""
    # ``__module__`` of built-in methods is None.
    module = getattr(kind, "__module__", None) or ""
    return module.partition(".")[0] == "executorch"


def new_record() -> Any:
    """Return an empty ``ETRecord`` of ExecuTorch's devtools.

    Raises:
        SettingError: The devtools are not installed.
    """
    try:
        return importlib.import_module(_RECORDS).ETRecord()
    except ImportError as error:
        raise SettingError(
            f"generate_etrecord=True cannot import executorch.devtools: {error}; install "
            "executorch and pandas, or remove the option"
        ) from error
