"""What torchao's ``quantize_`` makes of models, in the official runtime beside the model in eager.

A row x is rounded by the runtime in steps of s = (max(x, 0) - min(x, 0)) / 255. torchao's steps S
are as fine at best: a symmetric rule takes twice the largest number of the row, one scale for the
tensor the largest row. Each of two roundings moves an element by half its step, so two results are
at most (s + S) / 2 times the sum of the weights' absolute values apart.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lowerdeck.emitter import MissingKernelError, emit
from lowerdeck.exir_compat import to_edge_transform_and_lower
from lowerdeck.lowered_module import lower, to_backend
from lowerdeck.script import main
from lowerdeck.serializer import XnnDatatype, decode_payload
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Of, official
from lowerdeck_zoo.models.layers import Decoder
from tests.interop.runs import delegates, run

torchao = pytest.importorskip("torchao.quantization")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]
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


@pytest.mark.parametrize("options", [{}, ASYMMETRIC], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("form", ["torn", "torn, no delegate", "no delegate"])
def test_what_is_not_recognised_runs_on_other_kernels(
    form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    # torch's default decompositions leave nothing of the rounding but arithmetic.
    torch.manual_seed(0)
    model, inputs = rounded_model(Shared(), **options), (torch.randn(3, 48),)
    program = torch.export.export(model, inputs)
    if "torn" in form:
        program = program.run_decompositions()
    partitioner = XnnpackPartitioner()
    lowered = program if "no delegate" in form else to_backend(program, partitioner)
    if form == "torn":
        reasons = [why for name, why in partitioner.refused.items() if "_int_mm" in name]
        assert len(reasons) == 3
        assert all("rows" in one for one in reasons)
    (found,) = ran(lowered, inputs, tmp_path)
    # In steps of a symmetric rule the largest number of a row is a tie.
    assert (found - model(*inputs)).abs().max() <= 0.02


def test_one_layer_on_two_inputs_is_two_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 16), torch.randn(3, 16)
    model = Of(lambda m, x, y: (m.layer(x), m.layer(y).relu()), layer=nn.Linear(16, 8))
    model = rounded_model(model)
    lowered, _ = whole(torch.export.export(model, inputs))
    for found, x, wanted in zip(
        ran(lowered, inputs, tmp_path), inputs, model(*inputs), strict=True
    ):
        assert bool(((found - wanted).abs() <= bound(model.layer, x, {})).all())


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


@pytest.mark.parametrize(
    "way",
    [
        *("zero points are forgotten", "weights are given", "moved by another number"),
        *("sums of inputs", "scales of others", "products are read", "scales are read"),
        "rows are read",
    ],
)
def test_what_only_looks_like_a_layer_is_none(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Written(way)
    inputs = torch.randn(3, 16), torch.randint(-127, 128, (16, 16), dtype=torch.int8)
    partitioner = XnnpackPartitioner()
    lowered = to_backend(torch.export.export(model, inputs), partitioner)
    assert any("_int_mm" in name for name in partitioner.refused)
    wanted = model(*inputs)
    for found, one in zip(
        ran(lowered, inputs, tmp_path),
        wanted if isinstance(wanted, tuple) else [wanted],
        strict=True,
    ):
        # One step of a row, where its largest number is a tie.
        step = inputs[0].abs().max() / 127 * 127 * model.scale.max() * 1.01  # type: ignore[operator]
        assert (found - one).abs().max() <= max(step, 1 if one.dtype != torch.float32 else 0)


def test_a_layer_as_written_is_one() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 16), torch.zeros(16, 16, dtype=torch.int8)
    whole(torch.export.export(Written(""), inputs))


def intx(config: str, dtype: torch.dtype, granularity: Any) -> Any:
    named = "granularity" if config == "IntxWeightOnlyConfig" else "weight_granularity"
    return getattr(torchao, config)(**{"weight_dtype": dtype, named: granularity})


def static() -> Any:
    return torchao.Int8StaticActivationInt8WeightConfig(
        act_quant_scale=torch.tensor([[0.03]]), granularity=torchao.PerTensor()
    )


# What the page "Quantise for XNNPACK" says of each: what is stored, and what is said.
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
    "dynamic, groups of int8": (
        lambda: intx(DYNAMIC, torch.int8, torchao.PerGroup(32)),
        *(set(), "its weight has groups of 32 of 8 bits"),
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
    "static": (static, set(), "XNNPACK multiplies integers in layers alone"),
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


def test_float8_without_a_delegate_is_one_error() -> None:
    # Smaller weights are widened ahead of time.
    model = nn.Sequential(nn.Linear(256, 256)).eval()
    torchao.quantize_(model, torchao.Float8WeightOnlyConfig())
    with pytest.raises(MissingKernelError, match="no floats of 8 bits"):
        emit(torch.export.export(model, (torch.randn(1, 256),)))


def assert_one_file(program: ExportedProgram, precision: str | None = None) -> bytes:
    """Return the file of `to_backend` and `emit`, which the other ways must make too."""

    def make() -> XnnpackPartitioner:
        return XnnpackPartitioner(precision)

    direct = emit(to_backend(program, make())).to_bytes()
    compat = to_edge_transform_and_lower(program, partitioner=[make()]).to_executorch()
    assert lower(program, make()).to_bytes() == direct
    assert bytes(compat.buffer) == direct
    return direct


class Convolved(nn.Module):
    """A convolution over time, and linear layers beside views that are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 64, 3, padding=1), nn.GroupNorm(2, 64)
        self.qkv, self.last = nn.Linear(64, 192), nn.Linear(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.conv(x[:, :3])).relu_().transpose(1, 2)
        one, two, three = self.qkv(rows).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        mixed = (one @ two.mT).softmax(-1) @ three
        rows = mixed.transpose(1, 2).flatten(2)
        rows.flatten(1).add_(1)
        rows.mT.mul_(2)
        result: Tensor = self.last(rows)
        return result


CONFIGS: dict[str, Callable[[], Any] | None] = {
    "float": None,
    **{name: made[0] for name, made in CONFIGURATIONS.items()},
    "dynamic, Int8Tensor": lambda: torchao.Int8DynamicActivationInt8WeightConfig(
        set_inductor_config=False
    ),
    "alone, Int8Tensor": weights_alone,
}
FILE_FORMS = ("raw", "unwrapped", "functional")


# Each configuration of a matrix, which the static scale is of, or of a model with all else.
@pytest.mark.parametrize(
    ("name", "matrix", "form"),
    [
        (name, matrix or name == "static", FILE_FORMS[(number + matrix) % 3])
        for number, name in enumerate(CONFIGS)
        for matrix in (False, True)
    ],
)
def test_one_program_has_one_file(name: str, matrix: bool, form: str) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)
    model = (nn.Sequential(*layers) if matrix else Convolved()).eval().requires_grad_(False)
    if (make := CONFIGS[name]) is not None:
        torchao.quantize_(model, make())
    if form == "unwrapped":
        importlib.import_module("torchao.utils").unwrap_tensor_subclass(model)
    program = torch.export.export(model, (torch.randn((3, 64) if matrix else (2, 4, 12)),))
    if form == "functional":
        program = program.run_decompositions({})
    for precision in (None, "fp16") if name == "float" else (None,):
        assert_one_file(program, precision)


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"dynamic": True, "weight_bits": 4}])
@pytest.mark.parametrize("precision", [None, "fp16"])
def test_one_program_of_pt2e_or_floats_has_one_file(
    precision: str | None, options: dict[str, Any]
) -> None:
    pt2e = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    quantizer = importlib.import_module("lowerdeck.xnnpack.quantizer").XnnpackQuantizer
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    model, inputs = nn.Sequential(*layers, nn.Linear(512, 10)).eval(), (torch.randn(1, 3, 8, 8),)
    program = torch.export.export(model, inputs)
    prepared = pt2e.prepare_pt2e(program.module(), quantizer(**options))
    prepared(*inputs)
    quantised = torch.export.export(pt2e.convert_pt2e(prepared), inputs)
    for one in (program, quantised):
        assert_one_file(one, precision)


# The static scale is of a matrix, and the model has batches of tokens.
@pytest.mark.parametrize("name", ["float", "dynamic, groups of int4", "alone, rows of int5"])
def test_a_language_model_has_one_file_from_the_command_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Decoder().eval().requires_grad_(False)
    if (make := CONFIGS[name]) is not None:
        torchao.quantize_(model, make())
    inputs = (torch.randn(1, 12, 64),)
    made = ModuleType("one_file_model")
    made.make = lambda: (model, inputs)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    path = tmp_path / "model.pte"
    words = ["lower", "one_file_model:make", "--backend", "XnnpackBackend", "-o", str(path)]
    assert main(words) == 0
    assert path.read_bytes() == assert_one_file(torch.export.export(model, inputs))
