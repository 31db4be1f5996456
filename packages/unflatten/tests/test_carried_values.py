"""Values that pass between calls beside arguments and results: nobody but our modules sees them.

Eager's modules keep such values somewhere that export does not see, here in a dict of this file.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import export
from torch.utils.checkpoint import checkpoint
from unflatten_comparison import assert_equal  # type: ignore[import-not-found]

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten

STORE: dict[str, Any] = {}


class Makes(nn.Module):
    """Keeps a value that is no result of it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, key: Any) -> Tensor:
        y: Tensor = self.fc(x) * key
        STORE["kept"] = y.sin()
        return y + 1


class Reads(nn.Module):
    """Reads that value, which is no argument of it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, module: Tensor) -> Tensor:
        made: Tensor = self.fc(x) * STORE["kept"] + module
        return made


class Hands(nn.Module):
    """Reads a value and keeps another one."""

    def forward(self, x: Tensor) -> Tensor:
        STORE["kept"] = STORE["kept"] * x
        return x.tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.makes, self.reads, self.hands = Makes(), Reads(), Hands()

    def forward(self, x: Tensor) -> Tensor:
        first = self.reads(self.hands(self.makes(x, key=0.5)), module=x)
        made: Tensor = first + self.reads(self.hands(self.makes(x, key=2.0)), module=x.sin())
        return made


PATHS = ("makes", "reads", "hands", "reads.fc")
X = torch.randn(2, 4)


def _program(eager: nn.Module) -> Any:
    return export_preserving(eager, (X,))


class Once(nn.Module):
    """Calls every child of ``Net`` once: none has several forms."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.reads, self.hands = Makes(), Reads(), Hands()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.reads(self.hands(self.makes(x, key=x.cos())), module=x)
        return made


NETS = (Once, Net)


def _made(net: type[nn.Module]) -> tuple[nn.Module, Any]:
    eager = net()
    return eager, unflatten(_program(eager))


def _log(module: nn.Module, x: Tensor) -> list[Any]:
    log: list[Any] = []

    def before(_: Any, args: Any, kwargs: Any) -> None:
        log.append((copy.copy(args), dict(kwargs)))

    def after(_: Any, args: Any, kwargs: Any, result: Any) -> None:
        log.append((copy.copy(args), dict(kwargs), result))

    found = [module.get_submodule(path) for path in PATHS]
    handles = [
        *(each.register_forward_pre_hook(before, with_kwargs=True) for each in found),
        *(each.register_forward_hook(after, with_kwargs=True) for each in found),
    ]
    log.append(module(x))
    for handle in handles:
        handle.remove()
    return log


@pytest.mark.parametrize("net", NETS)
def test_hooks_see_eagers_arguments_and_results(net: type[nn.Module]) -> None:
    eager, made = _made(net)
    assert "read without being given" in str(made.swappable())
    wanted, found = _log(eager, X), _log(made, X)
    assert len(wanted) == len(found)
    for one, other in zip(found, wanted, strict=True):
        assert_equal(one, other)
    for path in PATHS:
        names = set(inspect.signature(made.get_submodule(path).forward).parameters)
        assert names <= {"x", "key", "module", "input"}, path
    assert_equal(_log(made.graph_module, X)[-1][0], eager(X))


@pytest.mark.parametrize("net", NETS)
def test_a_hook_that_changes_a_result_changes_it_alone(net: type[nn.Module]) -> None:
    eager, made = _made(net)
    for module in (eager, made):
        for name in ("makes", "hands"):
            module.get_submodule(name).register_forward_hook(lambda _, __, result: result * 2)
    assert_equal(made(X), eager(X))


class Ignores(nn.Module):
    """Reads no more than its first argument."""

    def forward(self, x: Tensor, **_: Tensor) -> Tensor:
        return x


class Around(nn.Module):
    """Takes and returns whatever what is in it does, some calls deep."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList([inner])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner[0](*args, **kwargs) * 3


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager", fullgraph=True)


WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "around": Around,
    "two around": lambda module: Around(Around(module)),
    "compiled": _compiled,
    "compiled around": lambda module: _compiled(Around(module)),
    "around compiled": lambda module: Around(_compiled(module)),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("net", NETS)
def test_wrappers_and_compilers_of_parts_let_them_through(net: type[nn.Module], wrap: str) -> None:
    torch._dynamo.reset()
    eager, made = _made(net)
    wrapped = copy.deepcopy(made)
    for name in ("makes", "reads", "hands"):
        setattr(wrapped, name, WRAPS[wrap](wrapped.get_submodule(name)))
        # Compilers do not follow what eager's modules keep: it is wrapped by what hands on alone.
        for _ in range(wrap.count("around") * (1 + (wrap == "two around"))):
            setattr(eager, name, Around(eager.get_submodule(name)))
    # Compilers warn of inputs that another module computed with gradients.
    with torch.set_grad_enabled("compiled" not in wrap):
        for x in (X, X * 2):
            assert_equal(wrapped(x), eager(x))


@pytest.mark.parametrize("net", NETS)
def test_nothing_is_left_for_another_call(net: type[nn.Module]) -> None:
    eager, made = _made(net)
    wanted = eager(X)

    def fail(*_: Any) -> None:
        raise ValueError("failed")

    for path in PATHS:
        for register in ("register_forward_pre_hook", "register_forward_hook"):
            handle = getattr(made.get_submodule(path), register)(fail)
            with pytest.raises(ValueError, match="failed"):
                made(X)
            handle.remove()
            with pytest.raises(UnflattenError, match=r"called alone|which of them is meant"):
                made.reads(X, X)
    assert_equal(made(X), wanted)


@pytest.mark.parametrize("net", NETS)
def test_a_call_within_a_call_gets_nothing_that_is_not_its_own(net: type[nn.Module]) -> None:
    eager, made = _made(net)
    again: list[Tensor] = []
    refused: list[str] = []

    def calls_again(module: Any, args: Any, *_: Any) -> None:
        if len(again) < 20:
            again.append(args[0].detach())
            made(again[-1])

    def calls_alone(module: Any, args: Any) -> None:
        with pytest.raises(UnflattenError) as told:
            made.reads(*args, *args)
        refused.append(str(told.value))

    handles = [
        made.reads.fc.register_forward_pre_hook(calls_alone),
        made.hands.register_forward_hook(calls_again),
    ]
    assert_equal(made(X), eager(X))
    assert len(again) == 20
    assert refused
    for handle in handles:
        handle.remove()
    for one in (made.reads, made.hands):
        one.register_forward_hook(calls_again)
    assert_equal(made(X), eager(X))


@pytest.mark.parametrize("net", NETS)
def test_threads_read_their_own_values(net: type[nn.Module]) -> None:
    _, made = _made(net)
    inputs = [torch.full((2, 4), float(number)) for number in range(48)]
    wanted = [made(x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for found, one in zip(pool.map(made, inputs), wanted, strict=True):
            assert_equal(found, one)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_copies_compilers_and_exports_again_compute_the_same(
    net: type[nn.Module], strict: bool
) -> None:
    eager, made = _made(net)
    wanted = eager(X)
    assert_equal(copy.deepcopy(made)(X), wanted)
    assert_equal(pickle.loads(pickle.dumps(made))(X), wanted)
    compiled: Any = torch.compile(made, backend="eager", fullgraph=True)
    assert_equal(compiled(X), wanted)
    assert_equal(fx.symbolic_trace(made)(X), wanted)
    kept = ("makes", "reads", "hands", "reads.fc")
    again = export(made, (X,), strict=strict, preserve_module_call_signature=kept)
    assert_equal(again.module()(X), wanted)
    # What was recorded again is eager's.
    twice: Any = unflatten(again)
    for one, other in zip(_log(twice, X), _log(eager, X), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("net", NETS)
def test_modules_that_hand_values_on_are_replaced_together(net: type[nn.Module]) -> None:
    """Eager's reader had what eager's maker kept before, without a word."""
    eager, made = _made(net)
    expected, reads = eager(X), made.reads
    made.reads = eager.get_submodule("reads")
    with pytest.raises(UnflattenError, match="a module that reads 1 value"):
        made(X)
    made.reads = Around(reads)
    made.makes = eager.get_submodule("makes")
    with pytest.raises(UnflattenError, match="A Makes stands for a module in which"):
        made(X)
    for path, module in eager.named_children():
        made.set_submodule(path, module)
    assert_equal(made(X), expected)


class OtherWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.layer.weight * 2, "bias": self.layer.bias}
        made: Tensor = torch.func.functional_call(self.layer, weights, (x,))
        return made


def test_a_module_that_is_called_with_other_weights_is_not_replaced() -> None:
    eager = OtherWeights()
    made: Any = unflatten(export_preserving(eager, (X,)))
    (row,) = made.swappable()
    assert not row.replaceable
    assert "reads 1 value" in row.reason
    assert_equal(made(X), eager(X))
    made.layer = copy.deepcopy(eager.layer)
    with pytest.raises(UnflattenError, match="a module that reads 1 value"):
        made(X)


@pytest.mark.parametrize("net", NETS)
def test_what_fails_in_such_a_call_names_its_line_and_a_missing_module(
    net: type[nn.Module],
) -> None:
    _, made = _made(net)
    held = made.makes.fc.weight
    made.makes.fc.weight = nn.Parameter(torch.ones(4, 5))
    with pytest.raises(RuntimeError, match=r"y: Tensor = self\.fc\(x\) \* key"):
        made(X)
    made.makes.fc.weight = held
    made.reads = None
    with pytest.raises(UnflattenError, match="child 'reads', but no module is there"):
        made(X)


class Recomputes(nn.Module):
    """Recomputes what is in it in backward, of the call before too, within its own call."""

    def __init__(self, inner: nn.Module, reentrant: bool, late: bool) -> None:
        super().__init__()
        self.inner, self.reentrant, self.late = inner, reentrant, late
        self.before: Any = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            self.before.sum().backward()
        x = x.detach().requires_grad_() if self.late else x
        run = partial(self.inner, **kwargs)
        result = checkpoint(run, x, *args, use_reentrant=self.reentrant)
        self.before = result if self.late else None
        return result.detach() if self.late else result


def _repeat(made: nn.Module, given: Tensor, late: bool) -> None:
    result = made(given)
    if late:
        made(given)
    else:
        result.sum().backward()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["makes", "reads", "hands"])
@pytest.mark.parametrize("net", NETS)
def test_a_call_that_backward_repeats_is_refused_and_leaves_nothing(
    net: type[nn.Module], name: str, reentrant: bool, late: bool
) -> None:
    eager, made = _made(net)
    inner = made.get_submodule(name)
    setattr(made, name, Recomputes(inner, reentrant, late))
    given = X.clone().requires_grad_()
    with pytest.raises(UnflattenError, match="called alone"):
        _repeat(made, given, late)
    setattr(made, name, inner)
    assert_equal(made(X), eager(X))


def _on_another_thread(inner: Any, *args: Any, **kwargs: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(partial(inner, *args, **kwargs)).result()


@pytest.mark.parametrize("name", ["makes", "reads", "hands"])
@pytest.mark.parametrize("net", NETS)
def test_a_wrapper_that_calls_on_another_thread_is_refused(
    net: type[nn.Module], name: str
) -> None:
    _, made = _made(net)
    inner = made.get_submodule(name)
    handle = Around(inner)
    handle.forward = partial(_on_another_thread, inner)  # type: ignore[method-assign]
    setattr(made, name, handle)
    with pytest.raises(UnflattenError, match="called alone"):
        made(X)


@pytest.mark.parametrize("net", NETS)
def test_a_hook_may_call_another_module_of_the_tree(net: type[nn.Module]) -> None:
    eager, made = _made(net)
    for model in (eager, made):
        inner: Any = model.get_submodule("reads.fc")
        for name in ("makes", "hands"):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda _, args, inner=inner: (inner(args[0]),))
            module.register_forward_hook(lambda _, __, result, inner=inner: inner(result))
    assert_equal(made(X), eager(X))
    # One that reads values is given none by such a hook.
    made.makes.register_forward_hook(lambda _, args, __: made.reads(*args, *args))
    with pytest.raises(UnflattenError, match=r"called alone|which of them is meant"):
        made(X)


SEEN: list[torch.Tensor] = []


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * 2


class _Layer(nn.Module):
    """Hands out what a child returns beside its own result, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = _Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.attention(x)
        SEEN.append(found)
        return x + torch.tanh(found)


class _HandsOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _Layer()

    def forward(self, x: torch.Tensor) -> Any:
        SEEN.clear()
        y = self.layer(x)
        return y, SEEN[0]


def test_the_table_says_what_is_handed_out_twice() -> None:
    x = torch.randn(2, 4)
    module = unflatten(export_preserving(_HandsOut(), (x,)))
    rows = {row.path: row.reason for row in module.swappable()}
    assert "computes 1 value that other modules read" in rows["layer"]
    assert "'layer' hands its result out too" in rows["layer.attention"]
    assert not rows["layer.attention.inner"]
