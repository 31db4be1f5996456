"""Our quantiser compared with ExecuTorch's, and what it makes in the official runtime."""

from __future__ import annotations

import copy
import importlib
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import lower, to_backend
from lowerdeck.lowered_module.quantization import float_weights
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck.xnnpack.quantize.offer import XnnpackQuantization
from lowerdeck_zoo import program, programs
from tests.interop.runs import assert_whole, run

from quantized_models import ANNOTATOR, QUANTIZE, with_pt2e  # isort: skip


def _installed(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


STEPS = _installed(QUANTIZE)
PEER = _installed(ANNOTATOR) if STEPS else None
OURS = _installed("lowerdeck.xnnpack.quantizer") if STEPS else None
pytestmark = pytest.mark.skipif(STEPS is None, reason="needs torchao")
with_peer = pytest.mark.skipif(PEER is None, reason="needs ExecuTorch's annotator")
NAMES = [one.name for one in programs("layers")]
MODES: dict[str, dict[str, bool]] = {
    "per tensor": {"per_channel": False},
    "per channel": {"per_channel": True},
    "dynamic": {"per_channel": True, "dynamic": True},
    "dynamic training": {"per_channel": True, "dynamic": True, "qat": True},
    "training": {"per_channel": False, "qat": True},
    "training per channel": {"per_channel": True, "qat": True},
}


def spec_as_data(spec: Any) -> Any:
    """Return a spec as plain data; two observers made alike are different objects."""
    if spec is None:
        return None
    if hasattr(spec, "edge_or_node"):
        edge = spec.edge_or_node
        return ("as", *(map(str, edge) if isinstance(edge, tuple) else [str(edge)]))
    made = spec.observer_or_fake_quant_ctr.p
    numbers = (spec.dtype, spec.quant_min, spec.quant_max, spec.qscheme, spec.ch_axis)
    return *numbers, spec.is_dynamic, made.func, str(sorted(made.keywords.items(), key=str))


def annotations(graph_module: GraphModule) -> dict[str, Any]:
    """Return what a quantiser wrote into a graph, by the names of its nodes."""
    found: dict[str, Any] = {}
    for node in graph_module.graph.nodes:
        annotation = node.meta.get("quantization_annotation")
        if annotation is None:
            continue
        given = {
            one.name: spec_as_data(spec)
            for one, spec in (annotation.input_qspec_map or {}).items()
            if spec is not None
        }
        output = spec_as_data(annotation.output_qspec)
        if output and output[0] == "as" and output[-1] == node.name:
            # As its own input, which may be as the result before it: that is one scale.
            input_spec = given[output[1]]
            output = input_spec if input_spec[0] == "as" else output
        if given or output:
            found[node.name] = (given, output)
    return found


@cache
def exported(name: str, qat: bool) -> GraphModule:
    """Return what quantisers are given: norms folded as ``prepare_pt2e`` does it."""
    made = program(name)
    exported_program = torch.export.export(made.module().train(qat), made.calls()[0].args)
    graph_module: GraphModule = exported_program.module(check_guards=False)  # type: ignore[assignment]
    if not qat:
        STEPS._fuse_conv_bn_(graph_module)
    return graph_module


def annotated(quantizer: Any, graph_module: GraphModule) -> dict[str, Any]:
    graph_module = quantizer.transform_for_annotation(copy.deepcopy(graph_module))
    quantizer.annotate(graph_module)
    return annotations(graph_module)


def both(graph_module: GraphModule, mode: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our annotations and ExecuTorch's."""
    options = MODES[mode]
    settings = PEER.get_symmetric_quantization_config(
        **{f"is_{option}": value for option, value in options.items()}
    )
    peer = PEER.XNNPACKQuantizer().set_global(settings)
    return (
        annotated(OURS.XnnpackQuantizer(**options), graph_module),
        annotated(peer, graph_module),
    )


@with_peer
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, mode) for name in NAMES for mode in MODES if "dynamic" not in mode),
        ("small_mlp", "dynamic training"),
    ],
)
def test_annotations_are_those_of_executorch(name: str, mode: str) -> None:
    ours, peers = both(exported(name, qat="training" in mode), mode)
    assert ours == peers


@with_peer
@pytest.mark.parametrize("name", NAMES)
def test_of_a_dynamic_program_we_quantise_lines_and_what_is_before_a_relu_as_well(
    name: str,
) -> None:
    graph_module = exported(name, qat=False)
    nodes = {node.name: node for node in graph_module.graph.nodes}
    ours, peers = both(graph_module, "dynamic")
    assert {name: ours[name] for name in peers} == peers
    for more in ours.keys() - peers.keys():
        (user,) = nodes[more].users
        assert "conv" in more
        assert "relu" in user.name or nodes[more].meta["val"].dim() == 3
    if name in ("small_cnn", "small_unet"):
        assert len(ours) > len(peers)


def quantised(name: str, **options: bool) -> tuple[ExportedProgram, tuple[torch.Tensor, ...]]:
    """Return a program that PT2E quantised, annotated by us."""
    model, inputs = program(name).module(), program(name).calls()[0].args
    named = {f"is_{option}": value for option, value in options.items()}
    return with_pt2e(model, inputs, annotator="ours", **named), inputs


@pytest.mark.parametrize("mode", ["per channel", "dynamic", "training"])
@pytest.mark.parametrize("name", ["small_cnn", "small_unet", "mixer"])
def test_what_we_annotate_is_one_delegate_and_right(name: str, mode: str, tmp_path: Path) -> None:
    converted, inputs = quantised(name, **MODES[mode])
    lowered = to_backend(converted, XnnpackPartitioner())
    assert_whole(lowered)
    ((found,),) = run(emit(lowered).to_bytes(), [inputs], tmp_path)
    wanted = converted.module()(*inputs)
    # Ties may be rounded another way, once in each layer; dynamic: the runtime is finer, by rows.
    largest = float(wanted.abs().max())
    assert float((found - wanted).abs().max()) <= 0.03 * largest


class Sequence(nn.Module):
    """Each kind of layer that has a weight, over a sequence of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.grouped = nn.Conv1d(64, 64, 3, padding=2, dilation=2, groups=4)
        self.depthwise = nn.Conv1d(64, 64, 5, padding=2, groups=64)
        self.transposed = nn.ConvTranspose1d(64, 64, 3, padding=1)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.gru = nn.GRU(64, 64, batch_first=True)
        self.lstm_cell, self.gru_cell = nn.LSTMCell(64, 64), nn.GRUCell(64, 64)
        self.normed = nn.utils.weight_norm(nn.Linear(64, 64))
        self.odd = nn.Linear(64, 40)
        self.last = nn.Linear(40, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens).transpose(1, 2)
        for layer in (self.conv, self.grouped, self.depthwise, self.transposed):
            x = torch.relu(layer(x))
        x = self.gru(self.lstm(x.transpose(1, 2))[0])[0]
        last = self.gru_cell(self.lstm_cell(x[:, -1])[0])
        x = x + last.unsqueeze(1)
        made: torch.Tensor = self.last(self.odd(self.normed(x)))
        return made


@pytest.mark.parametrize(
    ("mode", "floats"),
    [
        ("int8", {"table", "lstm", "gru", "lstm_cell", "gru_cell"}),
        ("int8-dynamic", {"table", "depthwise"}),
        (
            "8da4w",
            {
                *("table", "conv", "grouped", "depthwise", "transposed", "normed", "last"),
                *("lstm", "gru", "lstm_cell", "gru_cell"),
            },
        ),
        ("fp16", {"table"}),
    ],
)
def test_a_mode_quantises_every_layer_that_it_can_and_says_why_not(
    mode: str, floats: set[str]
) -> None:
    torch.manual_seed(0)
    model, inputs = Sequence().eval(), (torch.randint(0, 50, (1, 6)),)
    offer = XnnpackQuantization()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program, partitioner = offer.quantize(mode, model, inputs, {}, [])
        lowered = lower(program, partitioner)
        wanted = model(*inputs)
    left = float_weights(offer, mode, program)
    summary = lowered.delegation()
    # That a backend stores float16 is not seen in the program.
    shown = [] if mode == "fp16" else [(one.name, one.nbytes) for one in left]
    assert [(one.name, one.nbytes) for one in summary.float_weights] == shown
    assert str(summary).count("stays float: ") == len(shown)
    assert {one.name.partition(".")[0] for one in left} == floats, left
    assert not any(
        "is not quantised" in one.why for one in left if mode in ("int8-dynamic", "fp16")
    )
    ((found,),) = run(lowered.to_bytes(), [inputs])
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0)
