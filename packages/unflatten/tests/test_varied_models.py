"""Models as users write them: containers, recurrence, attention, odd inputs and outputs."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor, nn
from unflatten_comparison import FORMS, check  # type: ignore[import-not-found]

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module

# torch's own deprecations, of its recurrent layers and of its exporter.
pytestmark = pytest.mark.filterwarnings("ignore")


class Containers(Model):
    def __init__(self) -> None:
        super().__init__()
        first = OrderedDict([("a b", nn.Linear(4, 4)), ("1x", nn.ReLU())])
        self.named = nn.ModuleDict({"b": nn.Linear(4, 4), "a": nn.Sequential(first)})
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(3)])
        self.by_name = nn.ParameterDict({"y": nn.Parameter(torch.randn(4))})
        self.unused = nn.Sequential(nn.Linear(2, 2))
        self.held: list[Any] = [torch.ones(4), {"k": torch.zeros(4)}]

    def forward(self, x: Tensor) -> Any:
        for child in self.named.values():
            x = child(x)
        for weight in self.weights:
            x = x * weight
        return x + self.by_name["y"] - self.held[0] * self.held[1]["k"]


class Tied(Model):
    """Layers that share all weights and differ in nothing else that export records."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv1d(3, 3, 3, padding=1)
        self.b = nn.Conv1d(3, 3, 3, padding=2, dilation=2)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x) + self.b(x))


class Recurrent(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(6, 5)
        self.cell = nn.LSTMCell(5, 5)

    def forward(self, x: Tensor) -> Any:
        y, (h, c) = self.lstm(x)
        z, _ = self.gru(y)
        state = (z[0], z[1])
        for step in z:
            state = self.cell(step, state)
        return y, h, c, state


class Attends(Model):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        y, weights = self.attention(x, x, x)
        z, _ = self.attention(x, y, y, need_weights=False)
        return y, weights, z


class Bags(Model):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(10, 3, mode="mean")
        self.max = nn.EmbeddingBag(10, 3, mode="max")

    def forward(self, ids: Tensor, starts: Tensor) -> Any:
        return self.mean(ids, starts) + self.max(ids, starts)


class DataDependent(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)
        self.inner = Inner()

    def forward(self, x: Tensor, count: Tensor) -> Any:
        indices, _check = x.nonzero(), cast("Any", torch._check)
        _check(indices.shape[0] > 0)
        number: Any = count.item()
        _check(number >= 0)
        _check(number <= 10)
        return self.fc(indices.float()), self.inner(indices, number), torch.zeros(number)


class Inner(Model):
    def forward(self, indices: Tensor, number: int) -> Any:
        return torch.ones(indices.shape[0], number) * number


class Numbers(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=torch.complex64)

    def forward(self, x: Tensor, factor: int, name: str, flag: bool, none: None) -> Any:
        y = self.fc(x) * factor
        return {"y": y, "c": y.conj(), "real": torch.view_as_real(y)}, name, flag, none


class AnyArguments(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Sums()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.inner(*args, **kwargs)


class Sums(Model):
    def forward(self, first: Tensor, *rest: Tensor, y: Tensor, **more: Tensor) -> Any:
        return first + torch.stack(rest).sum(0) * y - more["z"]


Pair = namedtuple("Pair", "p q")


class Pairs(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Swaps()

    def forward(self, pair: Any, ordered: Any) -> Any:
        made = self.inner(pair, ordered)
        return Pair(made.q, made.p), ordered


class Swaps(Model):
    def forward(self, pair: Any, ordered: Any) -> Any:
        return Pair(pair.p + ordered["a"], pair.q[0] * ordered["b"])


class Overwrites(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("rows", torch.zeros(2, 4))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.fc(x))
        y[:, 1].mul_(2)
        x[1] = 7
        self.rows[0] = y[1].detach()
        self.count += 1
        self.rows.view(-1)[3] = 9.0
        return y, self.rows.clone()


class Functional(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        doubled = {name: value * 2 for name, value in self.fc.named_parameters()}
        return self.norm(torch.func.functional_call(self.fc, doubled, (x,)))


class Recursive(Model):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.child = Recursive(depth - 1) if depth else None

    def forward(self, x: Tensor, level: int = 0) -> Any:
        x = self.fc(x).tanh()
        return x if self.child is None else self.child(x, level + 1) + level


class CallsItself(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, left: int = 3) -> Any:
        return self.fc(x) if left == 0 else self(self.fc(x).relu(), left - 1) + x


X = torch.randn(2, 4)
_MODELS: list[tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = [
    (Containers, (X,), {}),
    (Tied, (torch.randn(2, 3, 8),), {}),
    (Recurrent, (torch.randn(3, 2, 4),), {}),
    (Attends, (torch.randn(2, 5, 8),), {}),
    (Bags, (torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 3])), {}),
    (DataDependent, (torch.tensor([1, 0, 2]), torch.tensor(3)), {}),
    (Numbers, (X.to(torch.complex64), 2, "mean", True, None), {}),
    (AnyArguments, (X, X + 1, X + 2), {"z": X, "y": X}),
    (Pairs, (Pair(X, [X + 1]), OrderedDict(b=X, a=X)), {}),
    (Overwrites, (X,), {}),
    (Functional, (X,), {}),
    (Recursive, (X,), {}),
    (lambda: nn.Sequential(CallsItself()), (X,), {}),
]


@pytest.mark.parametrize(("model", "args", "kwargs"), _MODELS)
def test_model(
    model: Callable[[], nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    check(model(), args, kwargs, calls=2, forms=("non-strict decomposed",))


@pytest.mark.heavy
@pytest.mark.parametrize(("model", "args", "kwargs"), _MODELS)
def test_model_in_every_form(
    model: Callable[[], nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    check(model(), args, kwargs, forms=FORMS)
