"""`verify` accepts of one XNNPACK node what the official runtime runs, by types and scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from lowerdeck import serializer as pte
from lowerdeck_files import payloads, programs
from lowerdeck_zoo import official

T, O = pte.XnnDatatype, pte.XnnOperator  # noqa: E741
TYPES = {
    T.FP32: (pte.ScalarType.FLOAT, torch.float32),
    T.FP16: (pte.ScalarType.HALF, torch.float16),
    T.BF16: (pte.ScalarType.BFLOAT16, torch.bfloat16),
    T.QINT8: (pte.ScalarType.CHAR, torch.int8),
    T.QUINT8: (pte.ScalarType.BYTE, torch.uint8),
    T.INT32: (pte.ScalarType.INT, torch.int32),
}
IMAGE = (1, 4, 4, 2)
WINDOW: dict[str, Any] = {
    f"{name}_{side}": 2 if name != "dilation" else 1
    for name in ("pooling", "stride", "dilation")
    for side in ("height", "width")
}
HALVED, FLAT = (1, 2, 2, 2), (4, 8)
UNARY: dict[pte.XnnOperator, tuple[dict[str, Any], Sequence[int]]] = {
    **{
        operator: ({}, IMAGE)
        for operator in (
            *(O.SOFTMAX, O.SIGMOID, O.CLAMP, O.FLOOR, O.SQUARE_ROOT, O.CEILING, O.HARDSWISH),
            *(O.NEGATE, O.SQUARE, O.ABS, O.RECIPROCAL_SQUARE_ROOT, O.LOG, O.GELU, O.TANH),
            *(O.EXP, O.SIN, O.COS, O.COPY, O.CONVERT),
        )
    },
    O.LEAKY_RELU: ({"negative_slope": 0.5}, IMAGE),
    O.ELU: ({"alpha": 1.0}, IMAGE),
    O.STATIC_TRANSPOSE: ({"num_dims": 4, "perm": (0, 2, 1, 3)}, IMAGE),
    O.STATIC_RESIZE_BILINEAR_2D: ({"new_height": 2, "new_width": 2}, HALVED),
    O.STATIC_CONSTANT_PAD: ({"pre_paddings": (0,) * 4, "post_paddings": (0,) * 4}, IMAGE),
    O.AVG_POOLING_2D: (WINDOW, HALVED),
    O.MAX_POOLING_2D: (WINDOW, HALVED),
    O.STATIC_RESHAPE: ({"num_dims": 2, "new_shape": FLAT}, FLAT),
    O.STATIC_SLICE: ({"num_dims": 4, "offsets": (0, 1, 1, 0), "sizes": HALVED}, HALVED),
}
BINARY = (O.ADD, O.DIV, O.MINIMUM, O.MULTIPLY, O.SUBTRACT, O.MAXIMUM, O.PRELU)
JOINS = (O.CONCATENATE2, O.CONCATENATE3, O.CONCATENATE4, O.CONCATENATE5)
# Scale and zero point of each input, and of the output.
ALIKE, COARSER, SHIFTED = (0.5, 0), (1.0, 0), (0.5, 3)


class Case(NamedTuple):
    operator: pte.XnnOperator
    types: tuple[pte.XnnDatatype, ...]
    scales: tuple[tuple[float, int], ...]
    constant: pte.XnnDatatype | None = None

    def __str__(self) -> str:
        return f"{self.operator.label} {[kind.name for kind in self.types]} {self.scales}"


def cases(operator: pte.XnnOperator) -> Iterator[Case]:
    inputs = 2 if operator in BINARY else operator.joined or 1
    for source in TYPES:
        for result in TYPES:
            yield Case(operator, (source,) * inputs + (result,), (ALIKE,) * (inputs + 1))
        if inputs > 1 and source is not T.FP32:
            yield Case(operator, (T.FP32,) + (source,) * inputs, (ALIKE,) * (inputs + 1))
    for kind in (T.QINT8, T.QUINT8):
        for other in (COARSER, SHIFTED):
            for place in range(inputs + 1):
                scales = [ALIKE] * (inputs + 1)
                scales[place] = other
                yield Case(operator, (kind,) * (inputs + 1), tuple(scales))


def program(case: Case) -> tuple[bytes, tuple[torch.Tensor, ...]]:
    """Return a program of one node, and arguments of it."""
    count = len(case.types) - 1
    fields, result = UNARY.get(case.operator, ({}, IMAGE))
    if case.operator.joined:
        fields, result = {"axis": 3}, (*IMAGE[:3], IMAGE[3] * count)
    shapes = [IMAGE] * count + [tuple(result)]
    if case.operator is O.FULLY_CONNECTED:
        shapes = [(2, 4), (2, 4)]
    values = [
        _value(
            *(number, shape, kind, scale),
            external_id=number,
            flags=2 if number == count else 1,
        )
        for number, (shape, kind, scale) in enumerate(
            zip(shapes, case.types, case.scales, strict=True)
        )
    ]
    names = ["input_id"] if count == 1 else [f"input{number + 1}_id" for number in range(count)]
    ids: dict[str, Any] = dict(zip(names, range(count), strict=True))
    constants, data = [], b""
    if case.constant is not None:
        ids = {"input1_id": 0, "filter_id": 2, "bias_id": payloads.NONE}
        values.append(_value(2, (4, 4), case.constant, constant_buffer_idx=1))
        constants, data = [{"size": 16 * case.constant.bits // 8}], bytes(64)
    limits = (-1.0, 1.0) if case.operator is O.CLAMP else None
    node = payloads.node(case.operator, **ids, output_id=count, **fields, limits=limits)
    ends = {"num_externs": count + 1, "input_ids": list(range(count)), "output_ids": [count]}
    root = payloads.graph(values, [node], constants, **ends)
    return _file(payloads.payload(root, data), shapes, case.types), tuple(
        torch.ones(shape).to(TYPES[kind][1])
        for shape, kind in zip(shapes[:-1], case.types[:-1], strict=True)
    )


def _value(
    number: int, shape: Sequence[int], kind: pte.XnnDatatype, scale: Any = None, **fields: Any
) -> Any:
    if kind in (T.QINT8, T.QUINT8):
        scales = dict(zip(("scale", "zero_point"), scale, strict=True))
        fields["quant"] = ("PerTensorQuant", scales)
    return payloads.value(number, shape, datatype=int(kind), **fields)


def _file(blob: bytes, shapes: Sequence[Sequence[int]], types: Sequence[pte.XnnDatatype]) -> bytes:
    values = [
        programs.tensor(shape, TYPES[kind][0], 1024 * place)
        for place, (shape, kind) in enumerate(zip(shapes, types, strict=True))
    ]
    count = len(values)
    call = pte.DelegateCall(0, list(range(count)))
    made = programs.program(
        values, call, memory=1024 * count, inputs=range(count - 1), outputs=[count - 1]
    )
    return pte.serialize_pte(programs.add_delegates(made, blob, backend="XnnpackBackend"))


def is_accepted(written: bytes) -> bool:
    """Return whether the verifier accepts a file for the release that is installed."""
    hazards: list[pte.Hazard] = []
    try:
        pte.verify_pte(written, on_hazard=hazards.append)
    except pte.FormatError:
        return False
    is_newer = (official.binding_name() or "").endswith("._C")
    return is_newer or not any(hazard.release for hazard in hazards)


@pytest.mark.parametrize("operator", [*UNARY, *BINARY, *JOINS], ids=lambda one: one.label)
def test_what_the_runtime_runs_is_accepted_and_nothing_ends_it(operator: pte.XnnOperator) -> None:
    wrong = []
    for case in cases(operator):
        written, arguments = program(case)
        outcome = official.run(written, [official.Call(arguments)], refusable=True)
        assert not isinstance(outcome, official.Crash), str(case)
        if isinstance(outcome, official.Ran) and not is_accepted(written):
            wrong.append(f"{case}: {type(outcome).__name__}")
    assert wrong == []


@pytest.mark.parametrize("result", [T.FP32, T.BF16], ids=lambda one: one.name)
def test_a_layer_of_bfloat16_names_the_release_that_it_needs(result: pte.XnnDatatype) -> None:
    case = Case(O.FULLY_CONNECTED, (T.BF16, result), (ALIKE, ALIKE), T.BF16)
    written, arguments = program(case)
    outcome = official.run(written, [official.Call(arguments)], refusable=True)
    assert is_accepted(written) == isinstance(outcome, official.Ran)
