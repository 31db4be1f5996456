"""What this package expects of torch's private parts."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
from torch import nn

from lowerdeck.demo_backends._torch_private import compile_package, load_package


def test_a_compiler_of_native_code_takes_a_program_and_a_path(tmp_path: Path) -> None:
    # What it makes of them costs a compiler's run: tests/test_inductor_backend.py pays for it.
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(3, 2),))
    seen: dict[str, Any] = {}

    def compiler(given: Any, *, package_path: str) -> str:
        seen.update(path=package_path, inputs=given.example_inputs)
        return package_path

    parameters = inspect.signature(torch._inductor.aoti_compile_and_package).parameters
    assert next(iter(parameters)) == "exported_program"
    assert "package_path" in parameters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor, "aoti_compile_and_package", compiler)
        path = tmp_path / "code.pt2"
        assert compile_package(program, path) == path
    assert [tuple(one.shape) for one in seen["inputs"][0]] == [(3, 2)]
    with pytest.raises(RuntimeError, match="archive"):
        load_package(path)
