"""Where weights go: once, into the file that was asked for, and without a copy in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from quantized_cases import (  # type: ignore[import-not-found]
    IN,
    OUT,
    IntegerWeight,
    by_row,
)
from torch import nn
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode
from xnnpack_cases import Function  # type: ignore[import-not-found]

from lowerdeck.emitter import EmitConfig, EmittedProgram, emit
from lowerdeck.lowered_module import (
    MethodProgramsPartitionerSpec,
    get_lowered_backend_modules,
    to_backend,
)
from lowerdeck.runner import load
from lowerdeck.xnnpack import XnnpackPartitioner

Tensor = torch.Tensor
X = torch.randn(1, 3, 8, 8)


def net() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    return nn.Sequential(*layers).eval()


def keys_by_file(emitted: EmittedProgram) -> dict[str, set[str]]:
    stored = emitted.named_data.get_named_data_store_output()
    return {"": set(stored.pte_data), **{k: set(v) for k, v in stored.external_data.items()}}


def emitted_files(emitted: EmittedProgram, folder: Path) -> Path:
    emitted.save(folder / "model.pte")
    return folder / "model.pte"


def test_weights_of_delegates_go_where_all_weights_go(tmp_path: Path) -> None:
    model = net()
    lowered = to_backend(torch.export.export(model, (X,)), XnnpackPartitioner())
    inside, beside = emit(lowered), emit(lowered, config=EmitConfig(weights_file="weights"))
    assert keys_by_file(beside) == {"": set(), "weights": keys_by_file(inside)[""]}
    path = emitted_files(beside, tmp_path)
    assert path.stat().st_size < 288 * 4 * 4 < (tmp_path / "weights.ptd").stat().st_size
    found = load(path, data=tmp_path / "weights.ptd").run("forward", X)
    torch.testing.assert_close(found, model(X))


def tagged(model: nn.Module, name_of: Callable[[str], str | None]) -> ExportedProgram:
    """Return a program whose weights say which file they go to, as ExecuTorch's pass says it."""
    module = torch.export.export(model, (X,)).module()
    for node in module.graph.find_nodes(op="get_attr"):
        tag = name_of(str(node.target))
        node.meta.setdefault("custom", {})["delegate_constant_tag"] = tag
    return torch.export.export(module, (X,), strict=True)


@pytest.mark.parametrize("cached", [False, True])
def test_tagged_weights_go_to_files_of_their_own(cached: bool, tmp_path: Path) -> None:
    model = net()

    def files(name_of: Callable[[str], str | None]) -> dict[str, set[str]]:
        cache = tmp_path if cached else None
        program = tagged(model, name_of)
        return keys_by_file(emit(to_backend(program, XnnpackPartitioner(), cache=cache)))

    every = files(lambda _: None)[""]
    apart = files(lambda name: {"0": "convolution", "4": "linear"}.get(name[0]))
    # The batch norm is folded into what the convolution reads.
    assert {name: len(keys) for name, keys in apart.items()} == {
        "": 0,
        "convolution": 2,
        "linear": 2,
    }
    assert set().union(*apart.values()) == every
    half = files(lambda name: "linear" if name.startswith("4.weight") else None)
    assert half == {"": apart["convolution"], "linear": apart["linear"]}


def test_methods_and_partitions_share_equal_weights() -> None:
    model, other = nn.Linear(64, 64), nn.Linear(64, 64)
    other.load_state_dict(model.state_dict())
    programs = {
        name: torch.export.export(module, (torch.ones(2, 64),))
        for name, module in {
            "one": Function(lambda x, m: m(m(x).cumsum(0)), model),
            "two": Function(lambda x, m: m(x), other),
        }.items()
    }
    specs = {name: XnnpackPartitioner() for name in programs}
    lowered = to_backend(MethodProgramsPartitionerSpec(programs, specs))
    counts = [len(get_lowered_backend_modules(one.graph_module)) for one in lowered.values()]
    assert counts == [2, 1]
    stored = emit(lowered).named_data.get_named_data_store_output()
    assert sorted(memoryview(cast("bytes", one)).nbytes for one in stored.buffers) == [
        64 * 4,
        64 * 64 * 4,
    ]


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of new tensors that hold numbers."""

    made = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(arg) for arg in args if isinstance(arg, Tensor)}
        if isinstance(result, Tensor) and _memory(result) not in {0, *given}:
            self.made += result.numel() * result.element_size()
        return result


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0  # a fake one


def static(x: Tensor, w: Any) -> Tensor:
    found: Tensor = OUT(F.linear(IN(x), w()))
    return found


SIDE = 2048
MODES: dict[str, tuple[Callable[[Tensor, Any], Tensor], Callable[[], nn.Module]]] = {
    "floats": (lambda x, w: w(x), lambda: nn.Linear(SIDE, SIDE)),
    "static": (static, lambda: IntegerWeight(SIDE, SIDE)),
    "static, one scale": (static, lambda: IntegerWeight(SIDE, SIDE, axis=None)),
    "dynamic": (lambda x, w: F.linear(by_row(x), w()), lambda: IntegerWeight(SIDE, SIDE)),
    "weight only": (lambda x, w: F.linear(x, w()), lambda: IntegerWeight(SIDE, SIDE)),
}


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_are_as_xnnpack_wants_them_are_not_copied(mode: str, tmp_path: Path) -> None:
    function, make = MODES[mode]
    torch.save(make(), tmp_path / "weights")
    # What is loaded or mapped is memory that torch cannot share until one side writes.
    weights = torch.load(tmp_path / "weights", mmap=True, weights_only=False)
    program = torch.export.export(Function(function, weights).eval(), (torch.ones(1, SIDE),))
    size = sum(t.numel() * t.element_size() for t in weights.state_dict().values())
    with _Copies() as copies:  # type: ignore[no-untyped-call]
        emitted = emit(to_backend(program, XnnpackPartitioner()))
    assert copies.made <= size / 20
    assert len(keys_by_file(emitted)[""]) >= 1
