"""Copies of tensors: lazy where torch can make them so, and never a crash."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowerdeck.torch_base import (
    Extent,
    OwnCopies,
    copies,
    copy_graph_module,
    copy_module,
    lazy_clone,
)


def test_a_lazy_clone_shares_memory_until_it_is_written() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    copied = lazy_clone(weight)
    assert isinstance(copied, torch.nn.Parameter)
    assert torch._C._is_cow_tensor(copied)  # type: ignore[attr-defined]
    with torch.no_grad():
        copied.add_(1)
    assert torch.equal(weight, torch.zeros(4))
    assert torch.equal(copied, torch.ones(4))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.from_numpy(np.zeros(3, dtype=np.float32)),
        torch.eye(3).to_sparse(),
        torch.zeros(6)[1:4],
        torch.zeros(0),
    ],
    ids=["lent by numpy", "sparse", "view", "empty"],
)
def test_any_tensor_can_be_cloned(tensor: torch.Tensor) -> None:
    copied = lazy_clone(tensor)
    before = tensor.to_dense().clone()
    assert torch.equal(copied.to_dense(), before)
    copied.mul_(0).add_(copied)
    copied = copied.to_dense().add_(1)
    assert torch.equal(tensor.to_dense(), before)


# Each gives a tensor of three ones in ``tensor``, whose memory torch did not allocate for it.
LENT = {
    "torch.load": "torch.save(torch.ones(3), path); tensor = torch.load(path)",
    "mapped": "torch.save(torch.ones(3), path); tensor = torch.load(path, mmap=True)",
    "export.load": """
module = torch.nn.Module()
module.register_buffer("state", torch.ones(3))
module.forward = lambda x: x + module.state
program = torch.export.export(module, (torch.ones(3),))
torch.export.save(program, path)
tensor = torch.export.load(path).state_dict["state"]
""",
    "numpy": "tensor = torch.from_numpy(numpy.ones(3, dtype=numpy.float32))",
    "buffer": "tensor = torch.frombuffer(bytearray(numpy.ones(3, dtype=numpy.float32)), "
    "dtype=torch.float32)",
    "shared": "tensor = torch.ones(3).share_memory_()",
    "assigned": """
torch.save({"weight": torch.ones(3)}, path)
module = torch.nn.Module()
module.register_parameter("weight", torch.nn.Parameter(torch.zeros(3)))
module.load_state_dict(torch.load(path), assign=True)
tensor = module.weight.detach()
""",
}


def test_writing_to_a_copy_of_memory_that_torch_did_not_allocate(tmp_path: Path) -> None:
    # In a process of its own: what this holds up was a segmentation fault.
    code = f"""
import numpy, torch
from lowerdeck.torch_base import OwnCopies, lazy_clone
for number, (way, code) in enumerate({LENT!r}.items()):
    path = {str(tmp_path)!r} + f"/{{number}}.pt2"
    print(way, flush=True)
    exec(code)
    for copy in (lazy_clone(tensor), OwnCopies([tensor]).of(tensor), lazy_clone(tensor[1:])):
        copy.add_(1)
        assert copy.eq(2).all()
    assert tensor.eq(1).all()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_shares_memory_shares_it_in_the_copies() -> None:
    whole = torch.arange(8.0)
    parts = [whole[:6], whole[4:], whole.view(2, 4).t(), torch.zeros(2)]
    own = OwnCopies(parts)
    first, second, crossed, other = (own.of(part) for part in parts)
    first[5] = 50
    assert second[1] == 50
    assert crossed[1, 1] == 50
    assert whole[5] == 5
    assert other.eq(0).all()
    assert own.of(parts[0]).data_ptr() == first.data_ptr()
    assert own.of("no tensor") == "no tensor"


def test_of_memory_that_cannot_be_shared_only_what_is_asked_for_is_copied() -> None:
    saved = io.BytesIO()
    torch.save(torch.zeros(1_000_000), saved)
    saved.seek(0)
    whole = torch.load(saved)
    parts = [whole[100:200], whole[150:300].view(15, 10), whole[999_000:].view(torch.int32)]
    own = OwnCopies(parts)
    copies = [own.of(part) for part in parts]
    copies[0][60] = 7
    assert copies[1][1, 0] == 7
    assert whole.eq(0).all()
    for copy, part in zip(copies, parts, strict=True):
        assert copy.shape == part.shape
        assert copy.untyped_storage().nbytes() < 5000


def test_lazily_conjugated_tensors_are_copied_with_their_values() -> None:
    value = torch.complex(torch.ones(2), torch.ones(2))
    views = [value.conj(), torch.imag(value.conj()), torch.nn.Parameter(torch.ones(2))]
    own = OwnCopies(views)
    for view in views:
        copy = own.of(view)
        assert torch.equal(copy, view)
        assert type(copy) is type(view)
        assert copy.requires_grad == view.requires_grad


def test_a_weight_with_its_storage_to_itself_is_looked_up_in_no_map(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.Tensor] = []
    in_storage = copies._in_storage

    def counted(tensor: torch.Tensor) -> Extent:
        asked.append(tensor)
        return in_storage(tensor)

    monkeypatch.setattr(copies, "_in_storage", counted)
    weights = [torch.zeros(4) for _ in range(100)]
    own = OwnCopies(weights)
    made = [own.of(weight) for weight in weights]
    assert not asked
    made[0][0] = 7
    assert own.of(weights[0])[0] == 7
    assert weights[0][0] == 0


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_module_whose_weight_is_computed_is_copied(share: bool) -> None:
    layer: Any = torch.nn.utils.weight_norm(torch.nn.Linear(3, 2))
    copied: Any = copy_module(layer, share_parameters=share)
    x = torch.ones(1, 3)
    assert (copied.weight_v is layer.weight_v) is share
    with torch.no_grad():
        layer.weight_g.mul_(2)
    wanted = layer(x) if share else (layer(x) - layer.bias) / 2 + layer.bias
    torch.testing.assert_close(copied(x), wanted)


def test_copies_of_graphs_share_parameters_that_no_node_reads() -> None:
    module = torch.nn.Linear(2, 2)
    graph_module = torch.fx.GraphModule(module, torch.fx.symbolic_trace(module).graph)
    graph_module.register_buffer("unread", torch.ones(2))
    copied = copy_graph_module(graph_module)
    assert copied.graph is not graph_module.graph
    for name in ("weight", "bias", "unread"):
        assert getattr(copied, name) is getattr(graph_module, name)
