"""Beside ``torch.export.unflatten``: equal where it is right; where it is wrong, we are not.

Each test of the second half asserts torch's own failure too, so that we see when it is mended.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mode_models import SplitByModeTwice  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.unflatten import unflatten as torch_unflatten
from unflatten_comparison import compare, modules_of  # type: ignore[import-not-found]

from lowerdeck.unflatten import unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module

# torch's own: each of its calls warns of its own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


# Equal where torch is right


class Residual(Model):
    """The basic block of a ResNet."""

    def __init__(self, taken: int, made: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(taken, made, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(made)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(made)
        self.downsample = None
        if stride > 1 or taken != made:
            self.downsample = nn.Sequential(
                nn.Conv2d(taken, made, 1, stride, bias=False), nn.BatchNorm2d(made)
            )

    def forward(self, x: Tensor) -> Any:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet18(Model):
    """As torchvision lays it out."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        taken = width
        for number, factor in enumerate((1, 2, 4, 8), start=1):
            made = width * factor
            first = Residual(taken, made, 1 if number == 1 else 2)
            setattr(self, f"layer{number}", nn.Sequential(first, Residual(made, made, 1)))
            taken = made
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(taken, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _conv_bn(taken: int, made: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(taken, made, size, stride, (size - 1) // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(made), nn.ReLU6(inplace=True))


class InvertedResidual(Model):
    def __init__(self, taken: int, made: int, stride: int, expand: int) -> None:
        super().__init__()
        self.use_res_connect = stride == 1 and taken == made
        hidden = taken * expand
        layers: list[nn.Module] = [_conv_bn(taken, hidden, 1)] if expand != 1 else []
        layers += [
            _conv_bn(hidden, hidden, 3, stride, hidden),
            nn.Conv2d(hidden, made, 1, bias=False),
            nn.BatchNorm2d(made),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Any:
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


class MobileNetV2(Model):
    """As torchvision lays it out, with narrower layers."""

    def __init__(self) -> None:
        super().__init__()
        features: list[nn.Module] = [_conv_bn(3, 8, 3, 2)]
        taken = 8
        for expand, made, count, stride in ((1, 8, 1, 1), (6, 8, 2, 2), (6, 16, 3, 2)):
            for number in range(count):
                block = InvertedResidual(taken, made, stride if number == 0 else 1, expand)
                features.append(block)
                taken = made
        features.append(_conv_bn(taken, 32, 1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Any:
        return self.classifier(self.features(x).mean((2, 3)))


class Transformer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([TransformerBlock() for _ in range(2)])
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, causal=True)
        return {"logits": self.head(x), "hidden": [x]}


class TransformerBlock(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, *, causal: bool) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if causal else None
        y = self.norm(x)
        z, _ = self.attention(y, y, y, attn_mask=mask, need_weights=False)
        x = x + z
        return x + self.mlp(x)


_IMAGE = torch.randn(2, 3, 32, 32)
_IDS = torch.tensor([[1, 4, 2, 7]])


def _same(model: nn.Module, x: Tensor, *, strict: bool, preserved: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"strict": strict, "preserve_module_call_signature": preserved}
    program = export(copy.deepcopy(model), (x,), **options)
    mine, theirs = unflatten(program), torch_unflatten(program)
    expected = model(x)
    torch.testing.assert_close(mine(x), expected)
    torch.testing.assert_close(theirs(x), mine(x))
    assert modules_of(mine) == modules_of(model)
    assert set(mine.state_dict()) == set(theirs.state_dict())
    for name in preserved:
        mine.set_submodule(name, model.get_submodule(name))
        theirs.set_submodule(name, model.get_submodule(name))
    torch.testing.assert_close(mine(x), expected)
    torch.testing.assert_close(theirs(x), expected)


_MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, tuple[str, ...]]] = {
    "ResNet18": (lambda: ResNet18(4), _IMAGE, ("layer2", "layer3.0")),
    "MobileNetV2": (MobileNetV2, _IMAGE, ("features.2",)),
    "Transformer": (Transformer, _IDS, ("blocks.1.mlp",)),
}


@pytest.mark.parametrize("name", _MODELS)
def test_values_are_torchs(name: str) -> None:
    make, x, preserved = _MODELS[name]
    _same(make().eval(), x, strict=False, preserved=preserved)


@pytest.mark.heavy
@pytest.mark.parametrize("name", _MODELS)
def test_values_of_strict_programs_are_torchs(name: str) -> None:
    make, x, preserved = _MODELS[name]
    _same(make().eval(), x, strict=True, preserved=preserved)


@pytest.mark.heavy
@pytest.mark.parametrize("strict", [False, True])
def test_values_of_a_full_resnet_are_torchs(strict: bool) -> None:
    image = torch.randn(1, 3, 224, 224)
    _same(ResNet18().eval(), image, strict=strict, preserved=("layer1",))


# Where torch is wrong


def _outcome(run: Callable[[], Any], expected: Any) -> str:
    """Return what becomes of torch's: the name of an error, "wrong", or "right"."""
    try:
        torch.testing.assert_close(run(), expected)
    except AssertionError:
        return "wrong"
    except Exception as error:
        return type(error).__name__
    return "right"


class Expert(Model):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor, use_a: bool) -> Any:
        return self.a(x) if use_a else self.b(x)


class Mixture(Model):
    def __init__(self) -> None:
        super().__init__()
        self.expert = Expert()

    def forward(self, x: Tensor) -> Any:
        for use_a in (True, False, True, False):
            x = self.expert(x, use_a)
        return x


def test_calls_that_differ_in_the_child_that_they_call() -> None:
    model, x = Mixture(), torch.randn(2, 4)
    program = export(model, (x,))
    compare(model, unflatten(program), (x,))
    assert _outcome(lambda: torch_unflatten(program)(x), model(x)) == "wrong"


class ReadsOldValue(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        new = self.state + x
        y = self.state * 2
        self.state.copy_(new)
        return y


def test_a_buffer_written_before_the_last_reader_of_its_old_value() -> None:
    model, x = nn.Sequential(ReadsOldValue()), torch.arange(3.0)
    program = export(copy.deepcopy(model), (x,)).run_decompositions({})
    theirs = torch_unflatten(program)
    compare(copy.deepcopy(model), unflatten(program), (x,))
    assert _outcome(lambda: theirs(x), model(x)) == "wrong"


class Reader(Model):
    def __init__(self, box: list[Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.box = box

    def forward(self, x: Tensor) -> Any:
        return self.fc(x) + self.box[0]


class Host(Model):
    def __init__(self) -> None:
        super().__init__()
        self.box: list[Any] = [None]
        self.fc = nn.Linear(2, 2)
        self.reader = Reader(self.box)

    def forward(self, x: Tensor) -> Any:
        self.box[0] = self.fc(x)
        y = self.reader(x * 2)
        self.box[0] = None
        return y


def test_a_preserved_module_that_reads_an_intermediate_value() -> None:
    model, x = Host(), torch.randn(3, 2)
    expected = model(x)
    program = export(model, (x,), preserve_module_call_signature=("reader",))
    torch.testing.assert_close(unflatten(program)(x), expected)
    assert _outcome(lambda: torch_unflatten(program)(x), expected) == "wrong"


@pytest.mark.parametrize("strict", [False, True])
def test_calls_that_regions_interrupt(strict: bool) -> None:
    model, x = SplitByModeTwice(), torch.randn(2, 4)
    program = export(model, (x,), strict=strict)
    compare(model, unflatten(program), (x,))
    assert _outcome(lambda: torch_unflatten(program)(x), model(x)) != "right"


class NormsThrice(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = self.norm(x).tanh()
        return x


def test_a_preserved_stateful_module_called_three_times() -> None:
    model, x = NormsThrice(), torch.randn(3, 2)
    program = export(copy.deepcopy(model), (x,), preserve_module_call_signature=("norm",))
    program = program.run_decompositions({})
    compare(copy.deepcopy(model), unflatten(program), (x,))
    assert _outcome(lambda: torch_unflatten(program)(x), model(x)) != "right"


class Aliases(Model):
    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(4.0)
        self.register_buffer("base", base)
        self.register_buffer("bits", base.view(torch.int32))

    def forward(self, x: Tensor) -> Any:
        return self.base + x, self.bits + 1


def test_buffers_that_read_one_memory_as_other_types() -> None:
    model, x = Aliases(), torch.ones(4)
    program = export(model, (x,))
    torch.testing.assert_close(unflatten(program)(x), model(x))
    assert _outcome(lambda: torch_unflatten(program)(x), model(x)) != "right"


def test_a_call_counter_after_an_exception_and_after_a_direct_call() -> None:
    model, x = Mixture(), torch.randn(2, 4)
    program = export(model, (x,), preserve_module_call_signature=("expert",))
    for disturb in (_fail, _call_child):
        mine, theirs = unflatten(program), torch_unflatten(program)
        for module in (mine, theirs):
            disturb(module, x)
        torch.testing.assert_close(mine(x), model(x))
        assert _outcome(partial(theirs, x), model(x)) != "right"


def _fail(module: nn.Module, x: Tensor) -> None:
    hook = module.get_submodule("expert").register_forward_hook(_raise)
    with pytest.raises(ValueError, match="on purpose"):
        module(x)
    hook.remove()


def _raise(*_: Any) -> None:
    raise ValueError("on purpose")


def _call_child(module: nn.Module, x: Tensor) -> None:
    module.get_submodule("expert")(x, True)


class LayerCallsOther(Model):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.__dict__["other"] = other

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.__dict__["other"](x))


class Prefixes(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer10 = nn.Linear(2, 2)
        self.layer1 = LayerCallsOther(self.layer10)

    def forward(self, x: Tensor) -> Any:
        return self.layer1(x)


class TwoNames(Model):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.ModuleDict({"inner": self.a})

    def forward(self, x: Tensor) -> Any:
        return self.b["inner"](self.a(x))


class Vmapped(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return torch.vmap(self.fc)(x)


@pytest.mark.parametrize("model", [Prefixes, lambda: nn.Sequential(Vmapped())])
def test_models_for_which_torchs_fails(model: Callable[[], nn.Module]) -> None:
    eager, x = model(), torch.randn(3, 2)
    program = export(eager, (x,), strict=False)
    compare(eager, unflatten(program), (x,))
    assert _outcome(lambda: torch_unflatten(program)(x), eager(x)) != "right"


def test_a_module_under_two_names() -> None:
    eager, x = TwoNames(), torch.randn(3, 2)
    program = export(eager, (x,))
    mine, theirs = unflatten(program), torch_unflatten(program)
    compare(eager, mine, (x,))
    assert mine.get_submodule("b.inner") is mine.get_submodule("a")
    assert theirs.get_submodule("b.inner") is not theirs.get_submodule("a")


def _linear() -> tuple[nn.Module, Tensor, ExportedProgram]:
    eager, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(3, 2)
    return eager, x, export(eager, (x,), dynamic_shapes=({0: Dim("batch", min=2, max=8)},))


def _copied(module: nn.Module, x: Tensor) -> Any:
    return copy.deepcopy(module)(x)


def _pickled(module: nn.Module, x: Tensor) -> Any:
    return pickle.loads(pickle.dumps(module))(x)


def _compiled(module: nn.Module, x: Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="eager")(x)


def _exported_again(module: nn.Module, x: Tensor) -> Any:
    shapes = ({0: Dim("batch", min=2, max=8)},)
    return export(module, (x,), dynamic_shapes=shapes).module()(x)


@pytest.mark.parametrize("use", [_pickled, _compiled, _exported_again])
def test_uses_for_which_torchs_fails(use: Callable[[nn.Module, Tensor], Any]) -> None:
    eager, x, program = _linear()
    torch.testing.assert_close(use(unflatten(program), x), eager(x))
    assert _outcome(lambda: use(torch_unflatten(program), x), eager(x)) != "right"


def test_a_copy_of_torchs() -> None:
    eager, x, program = _linear()
    torch.testing.assert_close(_copied(unflatten(program), x), eager(x))
    assert _outcome(lambda: _copied(torch_unflatten(program), x), eager(x)) != "right"


class Builtins(Model):
    def forward(self, input: Tensor, id: Tensor, type: Tensor, *, max: Tensor) -> Any:  # noqa: A002
        return input.relu() * id + type - max


class CallsBuiltins(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Builtins()

    def forward(self, input: Tensor, **kwargs: Tensor) -> Any:  # noqa: A002
        return self.inner(input, id=input, type=kwargs["type"], max=kwargs["max"])


def test_swapping_a_module_whose_arguments_are_named_like_builtins() -> None:
    eager, x = CallsBuiltins(), torch.randn(3)
    kwargs = {"type": torch.ones(3), "max": torch.zeros(3)}
    program = export(eager, (x,), kwargs, preserve_module_call_signature=("inner",))
    mine, theirs = unflatten(program), torch_unflatten(program)
    for module in (mine, theirs):
        module.set_submodule("inner", eager.inner)
    torch.testing.assert_close(mine(x, **kwargs), eager(x, **kwargs))
    assert _outcome(lambda: theirs(x, **kwargs), eager(x, **kwargs)) == "TypeError"
