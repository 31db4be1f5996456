"""XNNPACK payloads read back, run by the reference runtime, and damaged in every way."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xnnpack_cases import Case, cases  # type: ignore[import-not-found]
from xnnpack_lowering import RUNTIME, lower, named_data, run, whole  # type: ignore[import-not-found]

from lowerdeck.lowered_module import LoweredBackendModule
from lowerdeck.serializer import (
    XnnConstant,
    XnnDatatype,
    XnnEncoding,
    XnnGraph,
    XnnNode,
    XnnOperator,
    XnnValue,
    decode_payload,
    encode_payload,
)
from lowerdeck.xnnpack import BlobError, DelegateInputError, DelegateRunError
from lowerdeck.xnnpack.payload import FLOAT

# torch says of even kernels that it copies the input
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning"),
    # torch's own, of every recurrent layer that is exported
    pytest.mark.filterwarnings("ignore:The tensor attributes self.layer:UserWarning"),
]
ALL = list(cases())


@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_reference_runtime_equals_eager_and_the_payload_reads_back(case: Case) -> None:
    delegate = whole(lower(case.model, case.inputs, dynamic_shapes=case.dynamic))
    for inputs in (case.inputs, *case.others):
        case.check(run(delegate, inputs), inputs)
    graph = decode_payload(delegate.processed_bytes)
    assert len(graph.constant_data) == 0
    assert encode_payload(graph) == delegate.processed_bytes


@pytest.fixture(scope="module")
def lowered() -> LoweredBackendModule:
    case = next(one for one in ALL if one.name == "dynamic_cnn")
    delegate: LoweredBackendModule = whole(lower(case.model, case.inputs))
    return delegate


def test_each_node_is_logged_under_its_identifier(lowered: LoweredBackendModule) -> None:
    handle = RUNTIME.init(memoryview(lowered.processed_bytes), [], named_data(lowered))
    seen: dict[int, str] = {}

    def log(identifier: int, start: int, end: int, _: object, label: str, __: object) -> None:
        assert end >= start
        seen[identifier] = label

    RUNTIME.execute_logged(handle, [torch.randn(2, 3, 6, 5)], log)
    assert list(seen) == list(range(len(handle.graph.nodes)))
    assert set(lowered.meta["debug_handle_map"]) <= set(seen)
    assert list(seen.values()) == [node.operator.label for node in handle.graph.nodes]


def test_images_are_logged_as_torch_counts_their_dimensions() -> None:
    torch.manual_seed(0)
    conv, pool = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.MaxPool2d(2)
    last = torch.nn.Conv2d(8, 8, 1)
    model = torch.nn.Sequential(conv, pool, torch.nn.ReLU(), last).eval()
    x = torch.randn(1, 3, 16, 16)
    delegate = whole(lower(model, (x,)))
    handle = RUNTIME.init(memoryview(delegate.processed_bytes), [], named_data(delegate))
    seen: dict[int, torch.Tensor] = {}
    RUNTIME.execute_logged(
        handle, [x], lambda name, start, end, values, *_: seen.update({name: values[0]})
    )
    made = {node.operator: seen[node.debug_handle] for node in handle.graph.nodes}
    with torch.no_grad():
        pooled = pool(conv(x))
        torch.testing.assert_close(made[XnnOperator.MAX_POOLING_2D].clamp(min=0), pooled.relu())
        torch.testing.assert_close(made[XnnOperator.STATIC_TRANSPOSE], last(pooled.relu()))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_payload_is_refused_or_runs_within_bounds(
    lowered: LoweredBackendModule, data: st.DataObject
) -> None:
    blob = bytearray(lowered.processed_bytes)
    if data.draw(st.booleans()):
        blob = blob[: data.draw(st.integers(0, len(blob) - 1))]
    for _ in range(data.draw(st.integers(0, 3))):
        if blob:
            at = data.draw(st.integers(0, len(blob) - 1))
            blob[at] = data.draw(st.integers(0, 255))
    try:
        handle = RUNTIME.init(memoryview(bytes(blob)), [], named_data(lowered))
        RUNTIME.execute(handle, [torch.ones(2, 3, 6, 5)] * handle.input_count)
    except (BlobError, DelegateRunError, DelegateInputError):
        return  # a clear refusal; anything else would fail the test


def relu() -> XnnGraph:
    """Return the graph of one relu."""
    values = [XnnValue(0, FLOAT, (2,), 1, 0), XnnValue(1, FLOAT, (2,), 2, 1)]
    node = XnnNode(XnnOperator.CLAMP, {"input_id": 0, "output_id": 1}, (0.0, float("inf")))
    return XnnGraph("0", values, [node], input_ids=[0], output_ids=[1], num_externs=2)


def swap_arguments(graph: XnnGraph) -> None:
    graph.values[0].external_id, graph.values[1].external_id = 1, 0


def pool_places(graph: XnnGraph) -> None:
    node = replace(graph.nodes[0], operator=XnnOperator.ARG_MAX_POOLING_2D, fields={"input_id": 0})
    graph.nodes[0] = node


def write_late(graph: XnnGraph) -> None:
    graph.values.append(XnnValue(2, FLOAT, (2,)))
    second = XnnNode(XnnOperator.CLAMP, {"input_id": 0, "output_id": 2})
    graph.nodes[0] = XnnNode(XnnOperator.CLAMP, {"input_id": 2, "output_id": 1})
    graph.nodes.append(second)


def test_a_graph_made_by_hand_runs() -> None:
    handle = RUNTIME.init(memoryview(encode_payload(relu())), [], {})
    (output,) = RUNTIME.execute(handle, [torch.tensor([-1.0, 2.0])])
    assert output.tolist() == [0.0, 2.0]


# Rules that every payload must keep are those of the serializer, which the runtime asks first.
FORGERIES: dict[str, tuple[Callable[[XnnGraph], object], str]] = {
    "unknown value": (lambda g: g.nodes[0].fields.update(input_id=7), "there is no such value"),  # type: ignore[attr-defined]
    "written twice": (lambda g: g.nodes.append(g.nodes[0]), "the result of another node"),
    "argument": (lambda g: setattr(g.values[0], "external_id", 5), "argument 5"),
    "outputs": (lambda g: setattr(g, "num_externs", 3), "last arguments"),
    "swapped": (swap_arguments, "last arguments"),
    "no operator": (pool_places, "does not compute ArgMaxPooling2d"),
    "late": (write_late, "Clamp reads value 2, which no earlier node wrote"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_an_inconsistent_graph_is_refused_with_what_is_wrong(name: str) -> None:
    change, message = FORGERIES[name]
    graph = relu()
    change(graph)
    with pytest.raises(BlobError, match=message):
        RUNTIME.init(memoryview(encode_payload(graph)), [], {})


@pytest.mark.parametrize("datatype", [XnnDatatype.QUINT8, XnnDatatype.QDINT8, XnnDatatype.INT32])
def test_a_value_of_another_type_is_refused_by_its_name(datatype: XnnDatatype) -> None:
    graph = relu()
    graph.values[0].encoding = XnnEncoding(datatype, (0.5,))
    message = f"value 0 is {datatype.name}, which this runtime does not compute"
    with pytest.raises(BlobError, match=message):
        RUNTIME.init(memoryview(encode_payload(graph)), [], {})


def test_weights_that_are_missing_or_short_are_refused(lowered: LoweredBackendModule) -> None:
    blob, data = memoryview(lowered.processed_bytes), named_data(lowered)
    with pytest.raises(BlobError, match="no entry"):
        RUNTIME.init(blob, [], {})
    with pytest.raises(BlobError, match="bytes of named data"):
        RUNTIME.init(blob, [], {key: value[:-4] for key, value in data.items()})


def test_constants_inside_the_blob_are_read() -> None:
    graph = relu()
    node = XnnNode(XnnOperator.ADD, {"input1_id": 0, "input2_id": 2, "output_id": 1})
    graph.nodes[0] = node
    graph.constants.append(XnnConstant(None, 8, 4))
    graph.values.append(XnnValue(2, FLOAT, (2,), constant=graph.constants[1]))
    graph.constant_data = memoryview(bytes(4) + struct.pack("<2f", 10.0, 20.0))
    handle = RUNTIME.init(memoryview(encode_payload(graph)), [], {})
    assert RUNTIME.execute(handle, [torch.tensor([1.0, 2.0])])[0].tolist() == [11.0, 22.0]


def test_wrong_inputs_are_refused_by_position(lowered: LoweredBackendModule) -> None:
    handle = RUNTIME.init(memoryview(lowered.processed_bytes), [], named_data(lowered))
    with pytest.raises(DelegateInputError, match="found 0 inputs, expected 1"):
        RUNTIME.execute(handle, [])
    with pytest.raises(DelegateInputError, match=r"input 0 .* found torch\.int64"):
        RUNTIME.execute(handle, [torch.ones(2, 3, 6, 5, dtype=torch.int64)])
    with pytest.raises(DelegateRunError, match=r"Conv2d \(debug identifier"):
        RUNTIME.execute(handle, [torch.ones(2, 7, 6, 5)])
