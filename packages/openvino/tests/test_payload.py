"""What is inside payloads, told without OpenVINO, and what is said of broken ones."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import openvino
import pytest
import torch
from openvino_cases import numbers  # type: ignore[import-not-found]
from torch import nn

from lowerdeck.emitter import emit
from lowerdeck.inspect import PayloadGraph
from lowerdeck.lowered_module import get_lowered_backend_modules, to_backend
from lowerdeck.openvino import BlobError, OpenvinoPartitioner, decode_payload
from lowerdeck.openvino.payload import HEADER, without_version, xor_text
from lowerdeck.openvino.precision import text_of
from lowerdeck.script import main
from lowerdeck_zoo import Of

QD, STEP = torch.ops.quantized_decomposed, (0.5, 3, -128, 127, torch.int8)


def _sequence(*layers: nn.Module) -> Callable[..., Any]:
    return nn.Sequential(*layers).eval()


def _two(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, places = torch.topk(x @ y, 2)
    return values + y.sum(), x, places.int(), values


_IMAGE = numbers(1, 3, 16, 16)
MODELS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "mlp": (_sequence(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2)), (numbers(3, 8),)),
    "images": (_sequence(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6()), (_IMAGE,)),
    "pooled": (_sequence(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()), (_IMAGE,)),
    "grown": (_sequence(nn.ConvTranspose2d(3, 2, 2, 2), nn.Upsample(scale_factor=2)), (_IMAGE,)),
    "encoder": (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        (numbers(1, 5, 8),),
    ),
    "half": (lambda x: torch.softmax(x.half() @ x.half().T, -1), (numbers(4, 4),)),
    "integers": (lambda x, y: (x + y).clamp(0, 6), (numbers(4, dtype=torch.int32),) * 2),
    "chosen": (lambda x, y: torch.where(x > y, x, y).cumsum(0), (numbers(4), numbers(4, seed=2))),
    "embedded": (nn.Embedding(9, 4), (torch.tensor([[1, 2]]),)),
    "several": (_two, (numbers(3, 3), numbers(3, 3, seed=1))),
    "quantised": (
        lambda x: QD.dequantize_per_tensor(QD.quantize_per_tensor(x, *STEP), *STEP).relu(),
        (numbers(4, 4),),
    ),
}


def lowered(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Any:
    model = function if isinstance(function, nn.Module) else Of(function)
    exported = torch.export.export(model, inputs)
    return to_backend(exported, OpenvinoPartitioner())


def payload(name: str) -> bytes:
    """Return the first payload that became of a model."""
    delegate = next(iter(get_lowered_backend_modules(lowered(*MODELS[name]).graph_module)))
    return bytes(delegate.processed_bytes)


def check(blob: bytes) -> PayloadGraph:
    """Judge what is told of a payload by OpenVINO and by another reader of its text."""
    found = decode_payload(memoryview(blob))
    net = ElementTree.fromstring(text_of(blob))
    kinds = Counter(one.get("type") for one in net.iterfind("layers/layer"))
    _ = [kinds.pop(kind, None) for kind in ("Parameter", "Const", "Result")]
    assert Counter(node.operator for node in found.nodes) == kinds
    places = {
        (one.find("data").get("offset"), int(one.find("data").get("size")))  # type: ignore[union-attr, arg-type]
        for one in net.iter("layer")
        if one.get("type") == "Const"
    }
    assert found.constant_bytes == sum(size for _, size in places)
    compiled = openvino.Core().import_model(blob, "CPU")
    ports = [*compiled.inputs, *compiled.outputs]
    assert list(found.arguments) == list(range(len(ports)))
    names = {"f32": "fp32", "f16": "fp16", "i32": "int32", "i64": "int64", "boolean": "bool"}
    for port, number in zip(ports, found.arguments.values(), strict=True):
        value = found.values[number]
        assert value.dtype == names[port.get_element_type().get_type_name()]
        assert list(value.shape) == list(port.get_shape())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_operators_sizes_and_bytes_are_told_as_openvino_has_them(name: str) -> None:
    found = check(payload(name))
    assert found.nodes
    for node in found.nodes:
        assert {*node.inputs, *node.outputs} <= {*found.values}


def test_commands_open_the_delegate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.pte"
    emit(lowered(*MODELS["images"])).save(path)
    assert main(["inspect", str(path)]) == 0
    told = "; 1 Convolution, 1 Add, 1 Clamp; constants 448 B"
    assert told in capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["delegates"]
    first, *_, last = entry["payload"]["nodes"]
    weights = "fp32[4, 3, 3, 3] constant of 432 B"
    assert first == f"Convolution(fp32[1, 3, 16, 16], {weights}) -> fp32[1, 4, 14, 14]"
    assert last == "Clamp(fp32[1, 4, 14, 14]) -> fp32[1, 4, 14, 14], limits 0 to 6"
    other = tmp_path / "b.pte"
    emit(lowered(_sequence(nn.Conv2d(3, 4, 3), nn.Tanh()), (_IMAGE,))).save(other)
    assert main(["diff", str(path), str(other)]) == 1
    told = "method forward: delegate 0: + Tanh(fp32[1, 4, 14, 14]) -> fp32[1, 4, 14, 14]"
    assert told in capsys.readouterr().out


def test_opening_imports_neither_openvino_nor_torch(tmp_path: Path) -> None:
    path = tmp_path / "a.pte"
    emit(lowered(*MODELS["mlp"])).save(path)
    code = (
        "import sys; from lowerdeck.script import main; main(sys.argv[1:]); "
        "assert not {'openvino', 'torch'} & {*sys.modules}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(path)],
        capture_output=True,
        check=True,
        text=True,
    )
    assert "Gelu" in done.stdout  # What linear layers become depends on the processor.


def with_text(text: bytes, constants: bytes = b"") -> memoryview:
    """Return a payload with another graph."""
    begin = HEADER.size + len(constants)
    parts = (HEADER.size, 0, HEADER.size, len(constants), begin, len(text))
    return memoryview(HEADER.pack(*parts) + constants + xor_text(text))


LAYER = '<layer id="{}" name="a" type="{}" version="opset1">{}</layer>'
PORT = '<port id="0" precision="FP32"><dim>{}</dim></port>'


def net(*layers: str, edges: str = "") -> bytes:
    whole = f"<net><layers>{''.join(layers)}</layers><edges>{edges}</edges></net>"
    return f'<?xml version="1.0"?>{whole}'.encode()


ENDED = (LAYER.format(9, "Result", f"<input>{PORT.format(1)}</input>"),)
EDGE = '<edge from-layer="0" from-port="0" to-layer="9" to-port="0"/>'


def const(settings: str) -> str:
    return LAYER.format(0, "Const", f"<data {settings} />")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b'<?xml version="1.0"?>', "damaged graph"),
        (b'<?xml version="1.0"?><net', "damaged graph"),
        (b'<?xml version="1.0" encoding="utf-16"?><net/>x', "damaged graph"),
        (b'<?xml version="1.0"?><!DOCTYPE net [<!ENTITY a "b">]><net>&a;</net>', "document type"),
        (net(LAYER.format(0, "Abs", f"<input>{PORT.format(1)}</input>")), "KeyError"),
        (net(LAYER.format(0, "Abs", ""), LAYER.format(0, "Abs", "")), "two operators"),
        (net(const('offset="0" size="9"')), "a constant at 0 to 9 of 8"),
        (net(const('offset="-1" size="2"')), "a constant at -1 to 1 of 8"),
        (net(const(f'offset="0" size="{"9" * 5000}"')), "ValueError"),
        (net(const("")), "KeyError"),
        (net(LAYER.format(0, "Abs", f"<output>{PORT.format('9' * 5000)}</output>")), "ValueError"),
        (net("<layer/>"), "KeyError"),
        (b'<?xml version="1.0"?><net/>', "a graph without results"),
        (net(LAYER.format(0, "Abs", "")), "a graph without results"),
        (net(LAYER.format(0, "If", const('offset="0" size="9"'))), "0 to 9 of 8"),
    ],
    ids=range(15),
)
def test_a_graph_that_is_damaged_is_an_error_of_ours(text: bytes, told: str) -> None:
    with pytest.raises(BlobError, match=told):
        decode_payload(with_text(text, bytes(8)))


def test_bodies_of_loops_are_counted_and_not_taken_apart() -> None:
    settings = '<data offset="{}" size="8" />'
    layers = [LAYER.format(0, "Abs", ""), LAYER.format(1, "Result", "")]
    layers += [LAYER.format(2 + at, "Const", settings.format(at)) for at in (0, 8, 8)]
    body = f"<body>{net(*layers).decode()[21:]}</body>"
    loop = LAYER.format(0, "Loop", f"<data />{body}<output>{PORT.format('-1')}</output>")
    found = decode_payload(with_text(net(loop, *ENDED, edges=EDGE), bytes(16)))
    assert [node.operator for node in found.nodes] == ["Loop"]
    assert (found.nested, found.values[0].shape) == ({"Abs": 1}, ("?",))
    assert found.nodes[0].detail == "joins Abs"
    assert found.constant_bytes == 16


def test_a_deep_text_takes_no_stack() -> None:
    deep = b'<?xml version="1.0"?>' + b"<net>" * 200_000 + b"</net>" * 200_000
    with pytest.raises(BlobError, match="a graph without results"):
        decode_payload(with_text(deep))


@pytest.mark.parametrize("size", [0, 3, 47, 48, 100])
def test_a_payload_of_something_else_says_so(size: int) -> None:
    for blob in (bytes(size), b"\xff" * size):
        with pytest.raises(BlobError, match=f"of {size} bytes .*one for the device CPU"):
            decode_payload(memoryview(blob))


def test_damaged_bytes_end_in_an_error_of_ours_or_in_a_graph() -> None:
    blob = payload("encoder")
    header = len(blob) - len(without_version(memoryview(blob)))
    begin = header + HEADER.unpack_from(blob, header)[4]
    chance = random.Random(7)
    outcomes: Counter[bool] = Counter()
    for number in range(300):
        damaged = bytearray(blob)
        low, high = (0, header + HEADER.size) if number % 3 == 0 else (begin, len(blob))
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(low, high)] ^= 1 << chance.randrange(8)
        try:
            decode_payload(memoryview(damaged))
        except BlobError:
            outcomes[False] += 1
        else:
            outcomes[True] += 1
    assert min(outcomes[False], outcomes[True]) > 20


def test_the_text_is_crossed_as_openvino_does_it() -> None:
    blob = payload("mlp")
    rest = without_version(memoryview(blob))
    begin = HEADER.unpack_from(rest)[4]
    assert xor_text(text_of(blob)) == rest[begin:]
    assert xor_text(b"") == b""
