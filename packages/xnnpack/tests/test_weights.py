"""Where weights go: once, into the file that was asked for, and without a copy in memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Function  # type: ignore[import-not-found]
from quantized_cases import IN, OUT, IntegerWeight, by_row  # type: ignore[import-not-found]
from torch import nn
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode
from xnnpack_lowering import graph_of, lower  # type: ignore[import-not-found]

from lowerdeck.emitter import EmitConfig, EmittedProgram, emit
from lowerdeck.lowered_module import (
    MethodProgramsPartitionerSpec,
    get_lowered_backend_modules,
    to_backend,
)
from lowerdeck.runner import load
from lowerdeck.torch_base import data_address, view_tensor
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck.xnnpack.emit import scratch
from lowerdeck_zoo import Holding

Tensor = torch.Tensor
X = torch.randn(1, 3, 8, 8)


def net() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    return nn.Sequential(*layers).eval()


def keys_by_file(emitted: EmittedProgram) -> dict[str, set[str]]:
    stored = emitted.named_data.get_named_data_store_output()
    return {"": set(stored.pte_data), **{k: set(v) for k, v in stored.external_data.items()}}


def test_weights_in_memory_are_not_copied() -> None:
    # Not in files: what a partition holds of them is a lazy copy, which becomes a true one
    # where somebody asks for its address in order to write.
    model = nn.Sequential(nn.Linear(512, 600), nn.ReLU(), nn.Linear(600, 512)).eval()
    emitted = emit(lower(model, (torch.randn(2, 512),)))
    data = emitted.named_data.get_named_data_store_output().buffers
    views = [memoryview(cast("memoryview", one)) for one in data]
    found = {data_address(view_tensor(one, torch.uint8, [len(one)])) for one in views}
    assert found == {data_address(weight) for weight in model.parameters()}


def test_weights_of_delegates_go_where_all_weights_go(tmp_path: Path) -> None:
    model = net()
    lowered = lower(model, (X,))
    inside, beside = emit(lowered), emit(lowered, config=EmitConfig(weights_file="weights"))
    assert keys_by_file(beside) == {"": set(), "weights": keys_by_file(inside)[""]}
    path = tmp_path / "model.pte"
    beside.save(path)
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
    """Counts the bytes of new tensors that hold numbers, and those that lie in memory at once."""

    made = 0
    peak = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(arg) for arg in args if isinstance(arg, Tensor)}
        if not isinstance(result, Tensor) or func is torch.ops.aten.from_file.default:
            return result
        place = _memory(result)
        if place not in {0, *given}:
            self._sizes[place] = result.numel() * result.element_size()
            self.made += self._sizes[place]
        if place in self._sizes:
            self._names[place] += 1
            weakref.finalize(result, self._lost, place)
            self.peak = max(self.peak, sum(self._sizes.values()))
        return result

    def _lost(self, place: int) -> None:
        self._names[place] -= 1
        if not self._names[place]:
            del self._sizes[place]


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0  # a fake one


def static(x: Tensor, w: Any) -> Tensor:
    found: Tensor = OUT(F.linear(IN(x), w()))
    return found


SIDE = 2048
MODES: dict[str, tuple[Callable[[Tensor, Any], Tensor], dict[str, Any] | None]] = {
    "floats": (lambda x, w: w(x), None),
    "static": (static, {}),
    "static, one scale": (static, {"axis": None}),
    "dynamic": (lambda x, w: F.linear(by_row(x), w()), {}),
    "weight only": (lambda x, w: F.linear(x, w()), {}),
}


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_are_as_xnnpack_wants_them_are_not_copied(mode: str, tmp_path: Path) -> None:
    function, options = MODES[mode]
    made = nn.Linear(SIDE, SIDE) if options is None else IntegerWeight(SIDE, SIDE, **options)
    torch.save(made, tmp_path / "weights")
    # What is loaded or mapped is memory that torch cannot share until one side writes.
    weights = torch.load(tmp_path / "weights", mmap=True, weights_only=False)
    program = torch.export.export(Function(function, weights).eval(), (torch.ones(1, SIDE),))
    size = sum(t.numel() * t.element_size() for t in weights.state_dict().values())
    with _Copies() as copies:
        emitted = emit(to_backend(program, XnnpackPartitioner()))
    assert copies.made <= size / 20
    assert len(keys_by_file(emitted)[""]) >= 1


def in_groups(x: Tensor, w: Any) -> Tensor:
    return F.linear(by_row(x), w())


def four_bits() -> nn.Module:
    model: nn.Module = Function(in_groups, IntegerWeight(SIDE, SIDE, group=32, bits=4))
    return model


def convolutions(count: int, *, bias: bool = True, norms: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(count):
        layers.append(nn.Conv2d(96, 96, 3, padding=1, bias=bias))
        layers += [nn.BatchNorm2d(96)] * norms
    return nn.Sequential(*layers)


ROW, IMAGE = torch.ones(1, SIDE), torch.ones(1, 96, 12, 12)
OTHERWISE: dict[str, tuple[Callable[[], nn.Module], Tensor, str | None]] = {
    "groups of 4 bits": (four_bits, ROW, None),
    "float16": (lambda: nn.Linear(SIDE, SIDE).half(), ROW.half(), None),
    "bfloat16": (lambda: nn.Linear(SIDE, SIDE).bfloat16(), ROW.bfloat16(), None),
    "float16 in float32": (lambda: nn.Linear(SIDE, SIDE).half(), ROW.half(), "fp32"),
    "float32 as float16": (lambda: nn.Linear(SIDE, SIDE), ROW, "fp16"),
    "convolutions": (lambda: convolutions(16, bias=False), IMAGE, None),
    "convolutions of float16": (lambda: convolutions(16).half(), IMAGE.half(), None),
    "batch norms": (lambda: convolutions(24, norms=True), IMAGE, None),
}


def _limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what is little of gigabytes little of megabytes."""
    monkeypatch.setattr(scratch, "IN_MEMORY", 1 << 16)
    monkeypatch.setattr(scratch, "_PIECE", 1 << 14)


@pytest.mark.skipif(os.name != "posix", reason="files keep their names while they are mapped")
@pytest.mark.parametrize("mode", OTHERWISE)
def test_weights_that_xnnpack_wants_otherwise_take_little_memory(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, x, precision = OTHERWISE[mode]
    torch.save(make().eval(), tmp_path / "weights")
    model = torch.load(tmp_path / "weights", mmap=True, weights_only=False)
    program = torch.export.export(model, (x,))
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    in_memory = emit(to_backend(program, XnnpackPartitioner(precision))).to_bytes()
    _limited(monkeypatch)
    (tmp_path / "files").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "files"))
    with _Copies() as copies:
        emitted = emit(to_backend(program, XnnpackPartitioner(precision)))
    assert copies.peak <= size / 5
    assert not list((tmp_path / "files").iterdir())
    assert emitted.to_bytes() == in_memory


def test_memory_is_taken_where_no_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(256, 256).bfloat16().eval()
    program = torch.export.export(model, (torch.ones(1, 256, dtype=torch.bfloat16),))
    in_memory = emit(to_backend(program, XnnpackPartitioner())).to_bytes()
    _limited(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.warns(RuntimeWarning, match="they take memory instead"):
        found = emit(to_backend(program, XnnpackPartitioner())).to_bytes()
    assert found == in_memory


@pytest.mark.parametrize("number", [65504.0, 7e4, -5.0, float("inf"), -float("inf"), float("nan")])
def test_halves_hold_numbers_within_their_range(number: float) -> None:
    tensor = torch.tensor([1.0, number, -2.0])
    assert scratch.fits_half(tensor) == bool(torch.isfinite(tensor.half()).all())


class Repeated(
    Holding,
    kinds=lambda: nn.Embedding(2, 8),
    zeros=lambda: torch.tensor([[0.0], [-0.0]]).expand(2, 8).contiguous(),
):
    """Adds one row of a table to each token, and divides by zeros of two signs."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        kinds = self.kinds(torch.zeros(3, 5, dtype=torch.long))
        return kinds - x, x[0, :2] / self.zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_repeat_are_stored_once(dtype: torch.dtype) -> None:
    model, x = Repeated().to(dtype), torch.randn(3, 5, 8).to(dtype)
    values = graph_of(model, x).values
    shapes = sorted(value.shape for value in values if value.constant is not None)
    assert shapes == [(1, 1, 8), (2, 1)]
    found = load(emit(lower(model, (x,))).to_bytes()).run("forward", x)
    for one, expected in zip(found, model(x), strict=True):
        torch.testing.assert_close(one, expected)


def test_rows_that_a_result_needs_stay() -> None:
    x, rows = torch.randn(1, 8), torch.ones(4, 8)
    file = emit(lower(Function(lambda x: x + rows), (x,))).to_bytes()
    torch.testing.assert_close(load(file).run("forward", x), x + rows)


def test_rows_may_repeat_beside_a_size_that_varies() -> None:
    table = torch.randn(1, 1, 8).expand(1, 6, 8).contiguous()
    batch = torch.export.Dim("batch", min=1, max=9)
    model = Function(lambda x: x * table)
    lowered = lower(model, (torch.randn(2, 6, 8),), dynamic_shapes=(({0: batch},),))
    file = load(emit(lowered).to_bytes())
    for count in (1, 5, 2):
        x = torch.randn(count, 6, 8)
        torch.testing.assert_close(file.run("forward", x), x * table)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("groups", [1, 4])
def test_means_of_wide_rows_store_few_weights(groups: int, layout: torch.memory_format) -> None:
    images = torch.randn(1, 16, 96, 64).to(memory_format=layout)
    file = emit(lower(nn.GroupNorm(groups, 16), (images,))).to_bytes()
    assert len(file) < 40_000  # one row of weights for a whole image would take 393 kB
