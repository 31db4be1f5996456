"""No name of a module, a parameter or an argument is a trap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from unflatten_comparison import check, compare  # type: ignore[import-not-found]

from lowerdeck.unflatten import InputStructureError, unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module


class Builtins(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, input: Tensor, id: Tensor, type: Tensor, *, max: Tensor) -> Any:  # noqa: A002
        return self.fc(input) + id * type - max


class Around(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Builtins()

    def forward(self, input: Tensor, **kwargs: Tensor) -> Any:  # noqa: A002
        return self.inner(input, id=input, type=kwargs["type"], max=kwargs["max"])


@pytest.mark.parametrize("preserved", [(), ("inner",)])
def test_arguments_named_like_builtins(preserved: tuple[str, ...]) -> None:
    kwargs = {"type": torch.ones(2), "max": torch.zeros(2)}
    made = check(Around(), (torch.randn(1, 2),), kwargs, preserve_module_call_signature=preserved)
    if preserved:
        for module in made.values():
            module.inner = Builtins()
            module(torch.randn(1, 2), **kwargs)


NAMES = (
    "layer1",
    "layer10",
    "a@b",
    "n@1",
    "0",
    "graph",
    "code",
    "call_modules",
    "print_readable",
    "recompile",
    "meta",
    "_call_1",
    "_carried",
    "class",
    "self",
    "x",
    "weight with spaces",
    "a-b",
    # Python's parser takes these for other letters: "\u03bc", "fi", "K".
    "\u00b5",
    "\u03bc",
    "\ufb01",
    "fi",
    "\u212a",
    "K",
    "\uff18",
    "True",
    "__debug__",
    "a\nb",
    "'",
    '"',
    "\\",
    "\0",
    "\ud800",
    "getattr",
)


class Named(Model):
    """Children under every name, called by way of the registry as eager code must."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(NAMES):
            child = nn.Sequential(nn.Linear(2, 2), nn.Identity(), Scaled(number))
            self._modules[name] = child

    def forward(self, x: Tensor) -> Any:
        children: dict[str, Any] = self._modules
        for name in NAMES:
            x = children[name](x)
        return children["layer10"](x)


class Scaled(Model):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._parameters["meta"] = nn.Parameter(torch.ones(2) + number)
        self._buffers["graph"] = torch.ones(2) * number

    def forward(self, x: Tensor) -> Any:
        factor: Any = self._parameters["meta"]
        return x * factor + self._buffers["graph"]


def test_modules_and_state_of_every_name() -> None:
    eager, x = Named(), torch.randn(1, 2)
    module = unflatten(export(eager, (x,), strict=False))
    compare(eager, module, (x,))
    for name in ("graph", "code", "meta"):
        assert isinstance(getattr(module, name), nn.Module)


@pytest.mark.parametrize("name", ["graph", "code"])
def test_modules_in_a_list_of_any_name(name: str) -> None:
    class Listed(Model):
        def __init__(self) -> None:
            super().__init__()
            self._modules[name] = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Any:
            layers: Any = self._modules[name]
            return layers[1](layers[0](x))

    class Outer(Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Listed()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    check(Outer(), (torch.randn(1, 2),), forms=("non-strict",))


def test_a_module_that_calls_one_whose_name_it_begins() -> None:
    class Caller(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer10 = nn.Linear(2, 2)
            self.layer1 = Calls(self.layer10)

        def forward(self, x: Tensor) -> Any:
            return self.layer1(x)

    class Calls(Model):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.__dict__["other"] = other

        def forward(self, x: Tensor) -> Any:
            return self.fc(self.__dict__["other"](x))

    check(Caller(), (torch.randn(1, 2),), forms=("non-strict", "non-strict decomposed"))


def test_a_shared_module_under_two_names() -> None:
    class Twice(Model):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            self.b = nn.Module()
            self.b.inner = self.a
            self.c = nn.Sequential(self.a[0], nn.Linear(2, 2))

        def forward(self, x: Tensor) -> Any:
            inner: Any = self.b.inner
            return self.c(inner(self.a(x)))

    for module in check(Twice(), (torch.randn(1, 2),)).values():
        assert module.b.inner[0] is module.a[0]
        assert module.c[0] is module.a[0]


def test_a_child_takes_its_arguments_in_the_order_of_their_first_use() -> None:
    class Two(Model):
        def __init__(self) -> None:
            super().__init__()
            self.add = Adds()

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.add(y.relu(), x)

    class Adds(Model):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, first: Tensor, second: Tensor) -> Any:
            return self.fc(first) - second

    eager: Any = Two()
    x, y = torch.randn(1, 2), torch.randn(1, 2)
    module: Any = unflatten(export(eager, (x, y)))
    torch.testing.assert_close(module.add(x, y), eager.add(x, y))


KEYWORDS = tuple(
    name
    for name in (
        *NAMES,
        "type",
        "forward",
        "args",
        "arg_0",
        "keyword_0",
        "kwargs",
        "len",
        "dict",
        "_others",
        "",
    )
    # Python takes no further "self" and "x"; export fails on the others.
    if name not in {"self", "x", "0", "class", "__debug__", ""}
)


class Keywords(Model):
    """Takes arguments under every name that a caller can give, and nested dicts with such keys."""

    def forward(self, x: Tensor, nested: Any, **kwargs: Tensor) -> Any:
        for number, name in enumerate(KEYWORDS):
            x = x + kwargs[name] * number - nested[name][0]
        return {name: x * number for number, name in enumerate(KEYWORDS)}


class CallsByKeyword(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Keywords()

    def forward(self, x: Tensor, nested: Any, **kwargs: Tensor) -> Any:
        return self.inner(x, nested, **kwargs)


def _keyword_inputs() -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    kwargs = {name: torch.randn(2) for name in KEYWORDS}
    return (torch.ones(2), {name: [torch.randn(2)] for name in KEYWORDS}), kwargs


@pytest.mark.parametrize("preserved", [(), ("inner",)], ids=["flat", "preserved"])
def test_arguments_of_every_name(preserved: tuple[str, ...]) -> None:
    eager = CallsByKeyword()
    args, kwargs = _keyword_inputs()
    program = export(eager, args, kwargs, preserve_module_call_signature=preserved)
    module: Any = unflatten(program)
    torch.testing.assert_close(module(*args, **kwargs), eager(*args, **kwargs))
    if preserved:
        found = module.inner(*args, **kwargs)
        torch.testing.assert_close(found, eager.inner(*args, **kwargs))
        module.inner = Keywords()
        torch.testing.assert_close(module(*args, **kwargs), eager(*args, **kwargs))
    with pytest.raises(InputStructureError, match="a-b"):
        module(*args, **{name: value for name, value in kwargs.items() if name != "a-b"})
    with pytest.raises(InputStructureError, match="another"):
        module(*args, **kwargs, **{"another one": torch.ones(2)})


def test_an_argument_named_like_a_value_of_the_graph() -> None:
    class Adds(Model):
        def forward(self, add: Tensor, add_1: Tensor, mul_1: Any, _relu: Tensor) -> Any:
            y = add + add_1
            z = (y + add) * mul_1["type"]
            return (z * y + add_1).relu() * add_1 - _relu * add

    x = [torch.randn(2) for _ in range(4)]
    check(Adds(), (x[0], x[1], {"type": x[2]}, x[3]))


class NamedLikeABranch(Model):
    """A branch, beside state or a child that has the name that export gives a branch's graph."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        if isinstance(held, Tensor):
            self.register_buffer("true_graph_0", held)
        else:
            self.true_graph_0 = held

    def forward(self, x: Tensor) -> Any:
        held = self.true_graph_0
        y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (self.fc(x),))
        return y + (held if isinstance(held, Tensor) else held(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_what_the_model_names_as_export_names_branches() -> None:
    blocks = [NamedLikeABranch(torch.full((2,), 3.0)), NamedLikeABranch(nn.Linear(2, 2))]
    check(nn.Sequential(*blocks), (torch.ones(1, 2),))
