"""What torchao's ``quantize_`` makes of models, in the official runtime beside the model in eager.

A row x is rounded by the runtime in steps of s = (max(x, 0) - min(x, 0)) / 255. torchao's steps S
are as fine at best: a symmetric rule takes twice the largest number of the row, one scale for the
tensor the largest row. Each of two roundings moves an element by half its step, so two results are
at most (s + S) / 2 times the sum of the weights' absolute values apart.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.runner import load
from lowerdeck.serializer import XnnDatatype, decode_payload
from lowerdeck.xnnpack import XnnpackPartitioner
from tests.interop.runs import delegates, file_of, run

torchao = pytest.importorskip("torchao.quantization")
ASYMMETRIC = {"act_mapping_type": torchao.MappingType.ASYMMETRIC}
PER_TENSOR = {"granularity": torchao.PerTensor()}
SEVEN_BITS = {"reduce_range": True}


def rounded_model(model: nn.Module, **options: Any) -> nn.Module:
    """Return a model whose layers torchao changed to 8-bit integers, quantised at run time."""
    config = torchao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, **options)
    torchao.quantize_(model.eval(), config)
    return model


def whole(program: ExportedProgram) -> tuple[ExportedProgram, list[XnnDatatype]]:
    """Return a lowered program, and what the values of its one delegate are stored as."""
    partitioner = XnnpackPartitioner()
    lowered = to_backend(program, partitioner)
    (delegate,) = delegates(lowered)
    # What is read off at run time, and what was seen when the program was exported.
    assert all(one.startswith(("sym_size", "_assert_tensor")) for one in partitioner.refused)
    assert not partitioner.in_float
    kinds = [value.dtype for value in decode_payload(delegate.processed_bytes).values]
    assert XnnDatatype.QCINT8 in kinds
    return lowered, kinds


def ran(program: ExportedProgram, inputs: tuple[Tensor, ...], folder: Path) -> list[Any]:
    return run(emit(program).to_bytes(), [inputs], folder)[0]


def bound(layer: nn.Module, x: Tensor, options: dict[str, Any]) -> Tensor:
    """Return how far a layer's result may be from eager's."""
    rows = x.double()
    low, high = rows.amin(-1, keepdim=True).clamp(max=0), rows.amax(-1, keepdim=True).clamp(min=0)
    ours = theirs = (high - low) / 255
    if options != ASYMMETRIC:
        theirs = 2 * torch.maximum(-low, high) / (127 if options == SEVEN_BITS else 255)
    if options == PER_TENSOR:
        theirs = theirs.max()
    weights = layer.weight.dequantize().double().abs()
    # Both rules round alike where they are the same, but for ties: one element in some hundreds.
    steps = (ours + theirs) / 2 if options != ASYMMETRIC else ours / 20
    return steps * weights.sum(-1) + 1e-5 * (rows.abs() @ weights.T) + 1e-6


RULES = {
    "symmetric": {},
    "asymmetric": ASYMMETRIC,
    "tensor": PER_TENSOR,
    "seven bits": SEVEN_BITS,
}
FORMS = ("raw", "unwrapped", "functional", "without VNNI")
SHAPES = [
    ((3, 64), 32, True),
    ((2, 5, 33), 7, False),
    ((1, 3), 3, True),
    ((2, 3, 4, 40), 17, True),
]


# Each rule with each form, and each with each shape.
@pytest.mark.parametrize(
    ("rule", "form", "shape", "outputs", "bias"),
    [
        (rule, form, *SHAPES[(number + place) % 4])
        for number, rule in enumerate(RULES)
        for place, form in enumerate(FORMS)
    ],
)
def test_layers_run_on_integers(
    rule: str,
    form: str,
    shape: tuple[int, ...],
    outputs: int,
    bias: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    options = RULES[rule]
    if form == "without VNNI":
        kernels = importlib.import_module("torchao.kernel.intmm")
        monkeypatch.setattr(kernels, "_cpu_is_vnni_supported", lambda: False)
    model = rounded_model(nn.Sequential(nn.Linear(shape[-1], outputs, bias=bias)), **options)
    inputs = (torch.randn(shape) * torch.tensor([1.0, 8.0])[torch.arange(shape[-1]) % 2],)
    wanted, allowed = model(*inputs), bound(model[0], inputs[0], options)
    if form == "unwrapped":
        importlib.import_module("torchao.utils").unwrap_tensor_subclass(model)
    program = torch.export.export(model, inputs)
    if form == "functional":
        program = program.run_decompositions({})
    lowered, kinds = whole(program)
    assert kinds.count(XnnDatatype.QDINT8) == 1
    (found,) = ran(lowered, inputs, tmp_path)
    assert bool(((found - wanted).abs() <= allowed).all()), (found - wanted).abs().max()


class Shared(nn.Module):
    """Two layers on one input, and a third on what becomes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(48, 64), nn.Linear(48, 64, bias=False)
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        result: Tensor = self.last(nn.functional.silu(self.one(x)) * self.two(x))
        return result


@pytest.mark.parametrize("options", [{}, ASYMMETRIC], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_models_of_every_precision_and_size(
    dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Shared().to(dtype)
    floats = Shared()
    floats.load_state_dict(model.float().state_dict())
    model = rounded_model(model.to(dtype), **options)
    sizes = {"x": {0: Dim("batch", min=1, max=16)}}
    program = torch.export.export(
        model, (torch.randn(4, 6, 48, dtype=dtype),), dynamic_shapes=sizes
    )
    lowered, kinds = whole(program)
    # Layers on one input share its conversion.
    assert kinds.count(XnnDatatype.QDINT8) == 2
    for batch in (1, 7):
        x = torch.randn(batch, 6, 48, dtype=dtype)
        (found,) = ran(lowered, (x,), tmp_path)
        exact, eager = floats(x.float()), model(x).float()
        assert found.dtype == dtype
        assert found.shape == eager.shape
        # As far from the floats as eager is, or nearer.
        error, theirs = ((one.float() - exact).abs().max() for one in (found, eager))
        assert error <= 1.5 * theirs + 1e-4, (error, theirs)


def weights_alone() -> Any:
    return torchao.Int8WeightOnlyConfig(set_inductor_config=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["raw", "functional", "core"])
def test_weights_alone_stay_integers(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Shared().eval().to(dtype), (torch.randn(2, 5, 48, dtype=dtype),)
    torchao.quantize_(model, weights_alone())
    decomposed: Callable[[ExportedProgram], ExportedProgram] = {
        "raw": lambda program: program,
        "functional": lambda program: program.run_decompositions({}),
        "core": lambda program: program.run_decompositions(),
    }[form]
    lowered, _ = whole(decomposed(torch.export.export(model, inputs)))
    (found,) = ran(lowered, inputs, tmp_path)
    wanted, most = model(*inputs).float(), {torch.float32: 1e-5}.get(dtype, 2e-2)
    assert (found.float() - wanted).abs().max() <= most * wanted.abs().max()


class Written(nn.Module):
    """A layer as torchao writes it, but for one thing."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("weight", torch.randint(-127, 128, (16, 16), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(16, 1) / 100 + 0.001)

    def forward(self, x: Tensor, given: Tensor) -> Any:
        """Return the layer's result, and what else is read."""
        ops, way = torch.ops.torchao, self.way
        rule = "ASYMMETRIC" if way == "zero points are forgotten" else "SYMMETRIC"
        scale, zero = ops.choose_qparams_affine.default(
            x, rule, [1, 16], torch.int8, -128, 127, 1e-7, torch.float32, torch.int8, True
        )
        rows = ops.quantize_affine.default(x, [1, 16], scale, zero, torch.int8, -128, 127)
        weight = (given if way == "weights are given" else self.weight).contiguous().t()
        moved = 127 if way == "moved by another number" else 128
        product = torch._int_mm((rows.to(torch.int32) + moved).to(torch.uint8), weight)
        axis = 1 if way == "sums of inputs" else 0
        sums = weight.sum(dim=axis, keepdim=True, dtype=torch.int32) * 128
        product = product - (sums.t() if axis else sums)
        factor = scale * 2 if way == "scales of others" else scale
        result = product.to(torch.float32) * factor
        if way == "products are read":
            return result * self.scale.flatten(), product
        result = result * self.scale.flatten()
        if way == "rows are read":
            return result, rows.to(torch.float32)
        return (result, scale) if way == "scales are read" else result


LOOKALIKES = (
    *("zero points are forgotten", "weights are given", "moved by another number"),
    *("sums of inputs", "scales of others", "products are read", "scales are read"),
    "rows are read",
)


@pytest.mark.parametrize("way", ["", *LOOKALIKES])
def test_what_only_looks_like_a_layer_is_none(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Written(way)
    inputs = torch.randn(3, 16), torch.randint(-127, 128, (16, 16), dtype=torch.int8)
    partitioner = XnnpackPartitioner()
    lowered = to_backend(torch.export.export(model, inputs), partitioner)
    assert bool(partitioner.refused) == bool(way)
    if not way:
        return  # it is one, in the runtime's own steps
    wanted = model(*inputs)
    for found, one in zip(
        ran(lowered, inputs, tmp_path),
        wanted if isinstance(wanted, tuple) else [wanted],
        strict=True,
    ):
        # One step of a row, where its largest number is a tie.
        step = inputs[0].abs().max() / 127 * 127 * model.scale.max() * 1.01  # type: ignore[operator]
        assert (found - one).abs().max() <= max(step, 1 if one.dtype != torch.float32 else 0)


def intx(config: str, dtype: torch.dtype, granularity: Any, **options: Any) -> Any:
    named = "granularity" if config == "IntxWeightOnlyConfig" else "weight_granularity"
    return getattr(torchao, config)(**{"weight_dtype": dtype, named: granularity}, **options)


def static() -> Any:
    return torchao.Int8StaticActivationInt8WeightConfig(
        act_quant_scale=torch.tensor([[0.03]]), granularity=torchao.PerTensor()
    )


# What the page "Quantise for XNNPACK" says of each: what is stored, and what is said.
ZERO_POINTS = {"weight_mapping_type": torchao.MappingType.ASYMMETRIC}
DYNAMIC, ALONE = "Int8DynamicActivationIntxWeightConfig", "IntxWeightOnlyConfig"
CONFIGURATIONS: dict[str, tuple[Callable[[], Any], set[str], str]] = {
    "dynamic, rows of int8": (
        lambda: intx(DYNAMIC, torch.int8, torchao.PerAxis(0)),
        *({"QDINT8", "QCINT8"}, ""),
    ),
    "dynamic, rows of int3": (
        lambda: intx(DYNAMIC, torch.int3, torchao.PerAxis(0)),
        *({"QDINT8", "QCINT4"}, ""),
    ),
    "dynamic, groups of int4": (
        lambda: intx(DYNAMIC, torch.int4, torchao.PerGroup(32)),
        *({"QDINT8", "QBINT4"}, ""),
    ),
    # Zero points cost another layer.
    "dynamic, rows of int8 with zero points": (
        lambda: intx(DYNAMIC, torch.int8, torchao.PerAxis(0), **ZERO_POINTS),
        *({"QDINT8", "QCINT8"}, ""),
    ),
    "dynamic, groups of int4 with zero points": (
        lambda: intx(DYNAMIC, torch.int4, torchao.PerGroup(32), **ZERO_POINTS),
        *({"QDINT8", "QBINT4"}, ""),
    ),
    "dynamic, groups of 16 of int4": (
        lambda: intx(DYNAMIC, torch.int4, torchao.PerGroup(16)),
        *(set(), "its weight has groups of 16 with 4 bits"),
    ),
    "dynamic, groups of int8": (
        lambda: intx(DYNAMIC, torch.int8, torchao.PerGroup(32)),
        *(set(), "its weight has groups of 32 with 8 bits"),
    ),
    "alone, rows of int5": (
        lambda: intx(ALONE, torch.int5, torchao.PerAxis(0)),
        *({"QCINT8"}, ""),
    ),
    "alone, groups of int4": (
        lambda: intx(ALONE, torch.int4, torchao.PerGroup(32)),
        *(set(), "its weight has groups, which the runtime multiplies only with inputs"),
    ),
    "alone, groups of Int8Tensor": (
        lambda: torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(32)),
        *(set(), "its weight has groups, which the runtime multiplies only with inputs"),
    ),
    "static": (static, set(), "XNNPACK multiplies integers only in layers"),
    "float8": (torchao.Float8WeightOnlyConfig, set(), ""),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_each_configuration_is_what_the_page_says(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, stored, said = CONFIGURATIONS[name]
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10, bias=False)).eval()
    torchao.quantize_(model, make())
    inputs = (torch.randn(3, 64),)
    partitioner = XnnpackPartitioner()
    lowered = to_backend(torch.export.export(model, inputs), partitioner)
    kinds = {
        value.dtype.name
        for delegate in delegates(lowered)
        for value in decode_payload(delegate.processed_bytes).values
    }
    assert kinds - {"FP32"} == stored
    reasons = [*partitioner.in_float.values(), *partitioner.refused.values()]
    assert not said or any(one.startswith(said) for one in reasons)
    (found,) = ran(lowered, inputs, tmp_path)
    wanted = model(*inputs)
    # Scales of groups are stored as bfloat16.
    most = 2e-2 if "QBINT4" in stored else 1e-5
    assert (found - wanted).abs().max() <= most * wanted.abs().max() + 1e-6


RANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a row": lambda weight: weight[3].zero_(),
    "a group of all": lambda weight: weight[:, 32:64].zero_(),
    "a group of one": lambda weight: weight[2, 32:64].zero_(),
    "all": lambda weight: weight.zero_(),
    "tiny": lambda weight: weight[2].mul_(1e-30),
    "a tiny group": lambda weight: weight[2, :32].mul_(1e-38),
    "huge": lambda weight: weight[2].mul_(1e30),
    "negative zero": lambda weight: weight[3].fill_(-0.0),
}


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("bits", [4, 8])
def test_what_has_no_range_is_computed_as_in_eager(bits: int, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(128, 16)
    with torch.no_grad():
        RANGES[kind](layer.weight)
    model = nn.Sequential(layer, nn.ReLU()).eval()
    of = (torch.int4, torchao.PerGroup(32)) if bits == 4 else (torch.int8, torchao.PerAxis(0))
    torchao.quantize_(model, intx(DYNAMIC, *of))
    rows = torch.randn(5, 128)
    rows[2] = 0
    program = torch.export.export(model, (rows,), dynamic_shapes=({0: Dim("rows", max=9)},))
    file, calls = file_of(program), [rows[:0], rows, rows[2:3]]
    outputs = run(file, [(one,) for one in calls], tmp_path)
    for (found,), given in zip(outputs, calls, strict=True):
        # torchao itself cannot quantise no rows.
        wanted = model(given) if len(given) else torch.zeros(0, 16)
        assert found.shape == wanted.shape
        # A tie of a row's rounding is one step of 255 off, and so is one input of 128.
        bound = 0.02 * float(wanted.abs().max()) if wanted.numel() else 0.0
        assert not found.isnan().any()
        assert not wanted.numel() or float((found - wanted).abs().max()) <= bound + 1e-6
        ours = load(file).run("forward", given)
        torch.testing.assert_close(ours, found, rtol=1e-3, atol=1e-4)
