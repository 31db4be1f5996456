"""What this package expects of torch's private parts."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
from torch import nn

from lowerdeck.demo_backends._torch_private import (
    OpOverload,
    compile_package,
    is_mutable,
    load_package,
    returns_alias,
    schema_of,
    upper_bound,
)
from lowerdeck.demo_backends.tensor_data import view_tensor
from lowerdeck.torch_base import bytes_of

_aten = torch.ops.aten


def test_bytes_and_tensors_are_views_of_each_other() -> None:
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    data = bytes_of(tensor)
    assert torch.equal(view_tensor(data, torch.int32, (2, 3)), tensor)
    tensor[0, 0] = 7
    assert view_tensor(data, torch.int32, (6,))[0] == 7
    assert torch.equal(
        view_tensor(bytes_of(tensor.t()), torch.int32, (3, 2)), tensor.t().contiguous()
    )
    assert len(bytes_of(torch.empty(0))) == 0


def test_the_view_keeps_the_memory_alive() -> None:
    data = bytes_of(torch.full((1000,), 3.0))
    for _ in range(10):
        torch.zeros(1000)
    assert view_tensor(data, torch.float32, (1000,)).sum() == 3000


def test_upper_bounds_come_from_the_range_or_the_example() -> None:
    sizes = []
    for top in (16, None):
        batch = torch.export.Dim("batch", min=1, max=top) if top else torch.export.Dim("batch")
        program = torch.export.export(
            nn.Linear(2, 2), (torch.ones(3, 2),), dynamic_shapes=({0: batch},)
        )
        node = next(one for one in program.graph.nodes if one.op == "call_function")
        sizes.append([upper_bound(size) for size in node.meta["val"].shape])
    assert sizes == [[16, 2], [3, 2]]


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


def test_schemas_tell_names_and_defaults() -> None:
    assert isinstance(_aten.softmax.int, OpOverload)
    assert not isinstance(_aten.softmax, OpOverload)
    arguments = schema_of(_aten.add.Tensor).arguments
    assert [(one.name, one.default_value) for one in arguments] == [
        ("self", None),
        ("other", None),
        ("alpha", 1),
    ]


def test_schemas_tell_writes_and_aliases() -> None:
    assert is_mutable(_aten.relu_.default)
    assert not is_mutable(_aten.relu.default)
    assert returns_alias(_aten.view.default)
    assert not returns_alias(_aten.relu_.default)
    assert not returns_alias(_aten.add.Tensor)
