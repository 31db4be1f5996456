"""The annotator for PT2E: what it makes of numbers, and what it says without torchao.

What it annotates is compared with ExecuTorch's annotator in ``tests/interop``.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.lowered_module import PreprocessError, delegation_summary, to_backend
from lowerdeck.script import main
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck.xnnpack.quantize.offer import XnnpackQuantization

_WITHOUT = """
import sys
sys.modules["torchao"] = None
import lowerdeck.xnnpack
import lowerdeck.xnnpack.quantize.offer
try:
    import lowerdeck.xnnpack.quantizer
except ModuleNotFoundError as error:
    print(error)
"""


def test_without_torchao_the_package_is_there_and_the_annotator_says_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WITHOUT],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pip install 'torchao>=0.18'" in done.stdout


@pytest.fixture
def quantizer() -> Any:
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao raises dozens against itself
        return importlib.import_module("lowerdeck.xnnpack.quantizer").XnnpackQuantizer


class PatternIndices(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 2.0, y + 1


@pytest.mark.filterwarnings("ignore")
def test_numbers_become_tensors_where_floats_are_computed(quantizer: Any) -> None:
    inputs = (torch.ones(2), torch.ones(2, dtype=torch.int64))
    module: Any = torch.export.export(PatternIndices(), inputs).module(check_guards=False)
    quantizer().transform_for_annotation(module)
    one, other = module(*inputs)
    assert torch.equal(one, torch.full((2,), 3.0))
    assert torch.equal(other, torch.full((2,), 2))
    assert other.dtype == torch.int64
    assert [node.op for node in module.graph.nodes].count("get_attr") == 1


@pytest.mark.filterwarnings("ignore")
def test_what_is_not_accepted_stays_in_float(quantizer: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module: Any = torch.export.export(model, (torch.ones(1, 4),)).module(check_guards=False)
    quantizer(accepts=lambda node: node.name == "linear_1").annotate(module)
    found = [one.name for one in module.graph.nodes if "quantization_annotation" in one.meta]
    assert found == ["linear_1"]


def test_weights_have_four_or_eight_bits(quantizer: Any) -> None:
    with pytest.raises(Exception, match="found weights of 3 bits, expected 4 or 8"):
        quantizer(weight_bits=3)


def test_the_command_quantises_without_torchao_what_needs_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layer_model.py").write_text(
        "import torch\n\ndef example():\n    return torch.nn.Linear(64, 8), (torch.ones(1, 64),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "lowerdeck.xnnpack.quantizer", raising=False)
    for name in [one for one in sys.modules if one.startswith("torchao.")]:
        monkeypatch.setitem(sys.modules, name, None)
    words = ["lower", "layer_model:example", "--backend", "XnnpackBackend", "--quantize"]
    output = ["-o", str(tmp_path / "model.pte")]
    assert main([*words, "fp16", *output]) == 0
    assert capsys.readouterr().out.count("output 0: max") == 1
    assert main([*words, "fp16", *output, "--check", "--tolerance=0.1"]) == 0
    capsys.readouterr()
    (tmp_path / "model.pte").unlink()
    assert main([*words, "fp16", *output, "--check"]) == 2
    assert "--tolerance" in capsys.readouterr().err
    assert not (tmp_path / "model.pte").exists()
    for mode in ("int8", "int8-dynamic", "8da4w"):
        assert main([*words, mode, *output]) == 4
        assert "needs torchao: pip install" in capsys.readouterr().err


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_a_prepared_model_that_was_never_called_says_what_to_do(
    quantizer: Any, layer: str, dynamic: bool
) -> None:
    steps = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    model = nn.Linear(8, 4) if layer == "linear" else nn.Conv2d(3, 4, 3)
    x = torch.randn(2, 8) if layer == "linear" else torch.randn(1, 3, 6, 6)
    for calls in (0, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(model.eval(), (x,)).module()
            prepared = steps.prepare_pt2e(exported, quantizer(dynamic=dynamic))
            for _ in range(calls):
                prepared(torch.randn_like(x))
            program = torch.export.export(steps.convert_pt2e(prepared), (x,))
        if calls:
            assert delegation_summary(to_backend(program, XnnpackPartitioner())).delegates
        else:
            with pytest.raises(PreprocessError, match="call what prepare_pt2e returned"):
                to_backend(program, XnnpackPartitioner())


@pytest.mark.parametrize("mode", ["int8", "int8-dynamic", "8da4w", "fp16"])
def test_without_samples_the_example_inputs_are_the_sample(quantizer: Any, mode: str) -> None:
    model, x = nn.Linear(32, 4).eval(), torch.randn(2, 32)
    offer = XnnpackQuantization()
    batch = ({0: torch.export.Dim("batch", max=8)},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program, partitioner = offer.quantize(mode, model, (x,), {}, [], dynamic_shapes=batch)
        module = to_backend(program, partitioner).module()
    for inputs in (x, x.repeat(4, 1)):
        torch.testing.assert_close(module(inputs), model(inputs), atol=0.3, rtol=0)
