"""How ExecuTorch's runtime is found; it is loaded in ``tests/interop/test_lower_fastest.py``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from lowerdeck.runner import official_binding, official_binding_name

# The packages are not installed here, or must not be loaded: others stand in their places.
_PACKAGES = dict.fromkeys(
    f"{name}/__init__.py"
    for name in ("executorch", "executorch/extension", "executorch/extension/pybindings")
)
_MADE_UP = {
    "executorch/extension/pybindings/_portable_lib.py": "name, loads = '_portable_lib', 1\n",
    "openvino/__init__.py": "raise RuntimeError('nobody asked for it')\n",
    "openvino/libs/libopenvino_c.so.2541": "",
    "openvino/libs/libopenvino.so.2541": "",
}


def _told(tmp_path: Path, files: dict[str, str], **environment: str) -> list[str]:
    """Return what is found where only these files are, in a process of its own."""
    for name, text in (_PACKAGES | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text or "")
    program = f"""
import os, sys
from lowerdeck.runner import official_binding, official_binding_name
sys.path.insert(0, {str(tmp_path)!r})
print(official_binding_name().rpartition('.')[2])
print(official_binding()["name"], os.environ.get("OPENVINO_LIB_PATH"))
"""
    kept = {key: value for key, value in os.environ.items() if key != "OPENVINO_LIB_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env=kept | environment,
    )
    return done.stdout.split()


def test_the_binding_is_loaded_by_either_name_with_openvinos_library(tmp_path: Path) -> None:
    library = str(tmp_path / "openvino/libs/libopenvino_c.so.2541")
    assert _told(tmp_path, _MADE_UP) == ["_portable_lib", "_portable_lib", library]
    assert _told(tmp_path, {}, OPENVINO_LIB_PATH="mine")[2] == "mine"
    newer = tmp_path / "newer"
    made_up = {"executorch/extension/pybindings/_C.py": "name = '_C'\n"}
    assert _told(newer, made_up)[:2] == ["_C", "_C"]


def test_no_runtime_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def nothing(name: str, package: str | None = None) -> ModuleSpec | None:
        if name.startswith("executorch"):
            raise ModuleNotFoundError("No module named 'executorch'", name="executorch")
        return find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    assert official_binding_name() is None
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps executorch"):
        official_binding()
