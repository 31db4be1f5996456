"""An unflattened module can be used wherever the eager one can."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.utils import _pytree as pytree
from unflatten_comparison import (  # type: ignore[import-not-found]
    PLAIN,
    assert_equal,
    check,
    compare,
    programs,
)

from lowerdeck.unflatten import (
    FlatArgsAdapter,
    InputConstraintError,
    InputStructureError,
    InterpreterModule,
    unflatten,
)

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module


class Block(Model):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.fc = nn.Linear(size, size)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((size,), 2.0), persistent=False)
        self.offset = torch.ones(size)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
        seen: Any = self.seen
        seen.add_(1)
        y = self.fc(self.norm(x)) * self.scale + self.offset
        return y if shift is None else y + shift


class Net(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.shared = self.blocks[0].fc
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        blocks: Any = self.blocks
        for block in blocks:
            x = block(x)
        x = blocks[0](x, shift=x.mean())
        shared: Any = self.shared
        return self.head(shared(x))


@pytest.fixture(params=PLAIN)
def net(request: pytest.FixtureRequest) -> tuple[Any, Any, Tensor]:
    eager, x = Net(), torch.randn(2, 4)
    program = programs(eager, (x,), forms=(request.param,))[request.param]
    return eager, unflatten(program), x


def test_state_loads_from_and_into_eager(net: tuple[Any, Any, Tensor]) -> None:
    eager, module, x = net
    other = Net()
    module.load_state_dict(other.state_dict())
    compare(copy.deepcopy(other), module, (x,))
    eager.load_state_dict(module.state_dict())


def test_the_program_is_left_alone_and_let_go() -> None:
    import gc
    import weakref

    eager: Any = Net()
    x = torch.randn(2, 4)
    program = export(eager, (x,))
    text, signature = str(program.graph), str(program.graph_signature)
    meta = dict(program.graph_module.meta)
    module = unflatten(program)
    assert (str(program.graph), str(program.graph_signature)) == (text, signature)
    assert program.graph_module.meta == meta
    module(x)
    assert eager.blocks[0].seen == 0
    alive = weakref.ref(program)
    del program
    gc.collect()
    assert alive() is None


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    module = unflatten(export(Net(), (torch.randn(2, 4),)))
    module(torch.randn(2, 4))
    assert capsys.readouterr() == ("", "")


def test_parameters_train(net: tuple[Any, Any, Tensor]) -> None:
    eager, module, x = net
    for subject in (eager, module):
        optimizer = torch.optim.SGD(subject.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            subject(x).pow(2).sum().backward()
            optimizer.step()
    for name, value in eager.named_parameters():
        torch.testing.assert_close(module.get_parameter(name), value)
        torch.testing.assert_close(module.get_parameter(name).grad, value.grad)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_deepcopy_pickle_and_save(net: tuple[Any, Any, Tensor]) -> None:
    eager, module, x = net
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    copies = (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(saved, weights_only=False),
    )
    for subject in copies:
        compare(copy.deepcopy(eager), subject, (x,))
        assert subject.shared is subject.blocks[0].fc
        subject.head.weight.data.zero_()
    compare(eager, module, (x,))


def test_moving_to_another_type(net: tuple[Any, Any, Tensor]) -> None:
    eager, module, x = net
    eager.double()
    module.double()
    eager.blocks[0].offset, module.blocks[0].offset = (torch.ones(4).double() for _ in range(2))
    torch.testing.assert_close(module(x.double()), eager(x.double()))


def test_compile_as_one_graph(net: tuple[Any, Any, Tensor]) -> None:
    eager, module, x = net
    compiled: Any = torch.compile(module, fullgraph=True, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), eager(x))
    assert module.blocks[0].seen == 4


@pytest.mark.parametrize("strict", [False, True])
def test_export_again_with_dynamic_shapes(net: tuple[Any, Any, Tensor], strict: bool) -> None:
    eager, _, x = net
    shapes = ({0: Dim("batch", min=2, max=64)},)
    first = export(eager, (x,), dynamic_shapes=shapes, strict=strict)
    module = unflatten(first)
    again = export(module, (x,), dynamic_shapes=shapes, strict=strict)
    result = unflatten(again)
    assert list(result.state_dict()) == list(eager.state_dict())
    for rows in (2, 5):
        value = torch.randn(rows, 4)
        expected = eager(value)
        torch.testing.assert_close(module(value), expected)
        torch.testing.assert_close(result(value), expected)


def test_hooks_run_and_children_can_be_called_alone(net: tuple[Any, Any, Tensor]) -> None:
    eager, module, x = net
    seen: list[str] = []
    for name, child in module.named_modules():
        child.register_forward_hook(lambda *_, name=name: seen.append(name))
    module(x)
    assert seen.count("blocks.0") == 2
    assert seen.count("blocks.0.fc") == 3
    torch.testing.assert_close(module.blocks[0].fc(x), eager.blocks[0].fc(x))
    torch.testing.assert_close(module.blocks[1](x), eager.blocks[1](x))
    assert isinstance(module.head, InterpreterModule)
    assert module.head.type_name() == "torch.nn.modules.linear.Linear"


@dataclass
class Pair:
    first: Tensor
    second: list[Tensor]


pytree.register_dataclass(Pair)


class Structures(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, pair: Pair, options: dict[str, Any], *, extra: tuple[Any, ...]) -> Any:
        result = self.inner(pair, options, flag=None)
        scale = extra[1] * extra[0]
        return Pair(result["a"] * scale, [result["b"][0]]), {"none": None, "list": [pair.first, 3]}


class Inner(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, pair: Pair, options: dict[str, Any], flag: Any = None) -> Any:
        assert flag is None
        x = self.fc(pair.first) + options["bias"]
        return {"a": x, "b": (pair.second[0] + x, None)}


def structured() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    pair = Pair(torch.randn(2, 3), [torch.randn(2, 3)])
    args = (pair, {"bias": torch.randn(3), "unused": torch.ones(1)})
    return Structures(), args, {"extra": (2, torch.ones(()))}


@pytest.mark.parametrize("preserved", [(), ("inner",), ("inner", "inner.fc")])
def test_nested_inputs_and_outputs(preserved: tuple[str, ...]) -> None:
    eager, args, kwargs = structured()
    made = check(eager, args, kwargs, preserve_module_call_signature=preserved)
    if preserved:
        for module in made.values():
            found = module.inner(*args, flag=None)
            assert_equal(found, eager.inner(*args, flag=None))


def test_a_preserved_module_can_be_swapped_for_eagers() -> None:
    eager, args, kwargs = structured()
    forms = programs(eager, args, kwargs, preserve_module_call_signature=("inner",))
    other = Structures()
    for program in forms.values():
        module: Any = unflatten(program)
        module.inner = other.inner
        assert_equal(module(*args, **kwargs), other(*args, **kwargs))


def test_arguments_are_named_and_checked() -> None:
    eager, args, kwargs = structured()
    program = export(eager, args, kwargs)
    module = unflatten(program)
    assert_equal(
        module(options=args[1], pair=args[0], extra=kwargs["extra"]), eager(*args, **kwargs)
    )
    with pytest.raises(InputStructureError, match=r"'options'.*dict with keys"):
        module(args[0], {"bias": torch.ones(3)}, **kwargs)
    with pytest.raises(InputConstraintError, match=r"options\['bias'\].shape\[0\] must be 3"):
        module(args[0], {"bias": torch.ones(4), "unused": torch.ones(1)}, **kwargs)
    with pytest.raises(InputConstraintError, match=r"extra\[0\]"):
        module(*args, extra=(3, torch.ones(())))


def test_symbolic_sizes_are_checked() -> None:
    class Concat(Model):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return torch.cat([x, y], 1)

    rows = Dim("rows", min=3, max=9)
    shapes = ({0: rows}, {0: rows, 1: Dim("columns")})
    program = export(Concat(), (torch.ones(4, 2), torch.ones(4, 5)), dynamic_shapes=shapes)
    module = unflatten(program)
    assert module(torch.ones(3, 2), torch.ones(3, 7)).shape == (3, 9)
    with pytest.raises(InputConstraintError, match=r"y.shape\[0\] must equal x.shape\[0\] = 5"):
        module(torch.ones(5, 2), torch.ones(4, 7))
    with pytest.raises(InputConstraintError, match=r"x.shape\[0\] must be at most 9"):
        module(torch.ones(10, 2), torch.ones(10, 7))
    with pytest.raises(InputConstraintError, match=r"x.shape\[0\] must be at least 3"):
        module(torch.ones(2, 2), torch.ones(2, 7))
    with pytest.raises(InputConstraintError, match="'x' must have 2 dimensions"):
        module(torch.ones(5), torch.ones(5, 7))
    module.check_input_constraints = False
    assert module(torch.ones(1, 2), torch.ones(1, 7)).shape == (1, 9)


class TakesFirst(FlatArgsAdapter):
    def adapt(
        self,
        target_spec: Any,
        input_spec: Any,
        input_args: list[Any],
        metadata: dict[str, Any] | None = None,
        obj: Any | None = None,
    ) -> list[Any]:
        return input_args[: target_spec.num_leaves]

    def get_flat_arg_paths(self) -> list[str]:
        return ["the_input"]


def test_an_adapter_turns_other_structures_into_the_exported_one() -> None:
    eager, x = nn.Linear(2, 2), torch.ones(1, 2)
    module = unflatten(export(eager, (x,)), TakesFirst())
    torch.testing.assert_close(module(x, "more"), eager(x))
    torch.testing.assert_close(module([x]), eager(x))
    with pytest.raises(InputConstraintError, match="the_input"):
        module(torch.ones(1, 3), "more")
