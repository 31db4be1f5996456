"""Changes of one module that the right result may follow, or a refusal: never another result.

What chooses a form does not reach another thread; a module called alone, or in another one's
place, has nothing but its arguments; and what a module computes for a constant that it was never
called with is not in the program.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from random_comparison import compare_calls  # type: ignore[import-not-found]
from random_leaves import Leaf  # type: ignore[import-not-found]
from random_models import Case, Tree  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from unflatten_comparison import assert_equal  # type: ignore[import-not-found]

from lowerdeck.unflatten import UnflattenedModule, UnflattenError

ODD = ("threaded", "recomputed", "constant", "constant", "alone", "alone", "exchanged")

Call = Callable[..., Any]


def check_odd_change(
    case: Case,
    subject: UnflattenedModule,
    paths: Sequence[str],
    looked_at: Container[str],
    rng: random.Random,
) -> tuple[str, str]:
    """Make one change; return its kind, and whether the result was right or refused.

    Args:
        case: The model.
        subject: Its unflattened form; changed.
        paths: The modules that may be changed: called alone, and replaced.
        looked_at: Those in whose place no other kind of module may come: callers read its state.
        rng: Chooses.

    Raises:
        AssertionError: The result is another one.
    """
    if not paths:
        return "none", "same"
    kind, path = rng.choice(ODD), rng.choice(paths)
    eager = copy.deepcopy(case.model)
    silent: list[str] = []
    try:
        if kind == "alone":
            _compare_alone(case, eager, subject, path)
        elif kind == "exchanged":
            other = rng.choice(paths)
            if _related(path, other) or path in looked_at or other in looked_at:
                return "none", "same"
            if _class_asked(eager, path) != _class_asked(eager, other):
                # Their callers ask for the class, and call the other one in another way.
                return "none", "same"
            _exchange(eager, path, other)
            _exchange(subject, path, other)
            _compare_if_eager_can(case, eager, subject)
        else:
            outer, _, last = path.rpartition(".")
            parent = subject.get_submodule(outer)
            parent._modules[last] = Odd(parent._modules[last], kind, silent)
            compare_calls(eager, subject, case, 2)
    except UnflattenError as error:
        return kind, f"refused: {type(error).__name__}"
    except TypeError as error:
        # Another number of arguments: Python says so.
        if "argument" not in str(error):
            raise
        return kind, "refused: TypeError"
    finally:
        assert not silent, f"{path} ran with {silent}"
    return kind, "same"


def _related(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def _class_asked(model: nn.Module, path: str) -> tuple[bool, bool]:
    module = model.get_submodule(path)
    return isinstance(module, Leaf), isinstance(module, Tree)


def _exchange(model: nn.Module, one: str, other: str) -> None:
    first, second = model.get_submodule(one), model.get_submodule(other)
    for path, module in ((one, second), (other, first)):
        outer, _, last = path.rpartition(".")
        model.get_submodule(outer)._modules[last] = module


def _compare_if_eager_can(case: Case, eager: nn.Module, subject: nn.Module) -> None:
    args, kwargs = case.arguments()
    try:
        copy.deepcopy(eager)(*args, **kwargs)
    except Exception:
        # The other module takes or returns something else.
        return
    compare_calls(eager, subject, case, 2)


class Odd(nn.Module):
    """A module around another one, which it holds where nobody finds it."""

    def __init__(self, inner: Any, kind: str, silent: list[str]) -> None:
        super().__init__()
        self.held = [inner]
        self.kind = kind
        self.silent = silent

    def __getattr__(self, name: str) -> Any:
        # The layer's attributes, as adapters have them.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["held"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner = self.held[0]
        if self.kind == "threaded":
            return _on_a_thread(inner, args, kwargs)
        if self.kind == "recomputed":
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)
        changed = {key: _another(value) for key, value in kwargs.items()}
        result = inner(*args, **changed)
        wrong = [f"{key}={new}" for key, new in changed.items() if new is not kwargs[key]]
        self.silent.extend(wrong)
        return result


def _another(value: Any) -> Any:
    """Return another constant than this one; anything else as it is."""
    if type(value) is bool:
        return not value
    return value + 0.25 if type(value) is float else value


def _on_a_thread(inner: Call, args: Any, kwargs: Any) -> Any:
    run = _in_these_modes(inner)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run, *args, **kwargs).result()


def _in_these_modes(call: Call) -> Call:
    gradients = torch.is_grad_enabled()
    is_cast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def run(*args: Any, **kwargs: Any) -> Any:
        cast = torch.autocast("cpu", dtype=dtype, enabled=is_cast)
        with torch.set_grad_enabled(gradients), cast:
            return call(*args, **kwargs)

    return run


def _compare_alone(case: Case, eager: nn.Module, subject: nn.Module, path: str) -> None:
    """Call a module as eager calls its own, in the state that this has then."""
    calls: list[tuple[nn.Module, Any, Any, Any, int, Call]] = []

    watched: list[Any] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        # Copies would have the hook, too.
        watched.pop().remove()
        kept = copy.deepcopy(module)
        args, kwargs = _cloned((args, kwargs))
        torch.manual_seed(len(calls))
        expected = kept(*_cloned(args), **_cloned(kwargs))
        # The state before the call, which may write it.
        # What it computes depends on the modes that its caller has switched on.
        within = _in_these_modes(lambda call, *args, **kwargs: call(*args, **kwargs))
        calls.append((copy.deepcopy(module), args, kwargs, expected, len(calls), within))
        watch()

    def watch() -> None:
        own = eager.get_submodule(path)
        watched.append(own.register_forward_pre_hook(note, with_kwargs=True))

    watch()
    args, kwargs = case.arguments()
    eager(*args, **kwargs)
    refused: UnflattenError | None = None
    for before, args, kwargs, expected, seed, within in calls:
        module = subject.get_submodule(path)
        state = dict(before.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, value in module.named_buffers(remove_duplicate=False):
                if name in state:
                    value.copy_(state[name])
        torch.manual_seed(seed)
        try:
            found = within(module, *args, **kwargs)
        except UnflattenError as error:
            refused = error
            continue
        assert_equal(found, expected)
    if refused is not None:
        raise refused


def _cloned(value: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value
    )
