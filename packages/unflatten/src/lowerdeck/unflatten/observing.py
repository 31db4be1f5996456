"""Observe modules during an export: what cannot be recorded, and results that are arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.fx import traceback

from lowerdeck.torch_base import SYMBOLS, pytree
from lowerdeck.unflatten.notes import PASS_THROUGH

_IN_BRANCH = "is called in a branch or a loop, whose graph has no calls of modules"


@contextmanager
def observing(
    model: torch.nn.Module,
    modules: Mapping[str, torch.nn.Module],
    recorded: Sequence[str],
    observed: dict[str, str] | None,
) -> Iterator[None]:
    """Observe which modules cannot be recorded, and mark results that are arguments.

    Args:
        model: The model.
        modules: The modules by name.
        recorded: The names of those with a recorded signature.
        observed: The modules that cannot be recorded, with the reason; filled. None if hooks are
            traced.
    """
    names = set(recorded)
    containers: list[tuple[str, Any, _Leaves]] = []
    with ExitStack() as stack:

        def install_late(_: torch.nn.Module, __: Any) -> None:
            # Behind export's own hooks, which copy the containers of recorded modules.
            for path, module in modules.items():
                late = partial(_keep_container, path, containers)
                stack.callback(module.register_forward_hook(late).remove)

        for path, module in modules.items():
            observer = _Observer(path, path in names, containers, observed)
            if observed is not None:
                handle = module.register_forward_pre_hook(observer.before, with_kwargs=True)
                stack.callback(handle.remove)
            after = observer.after if observed is not None else _mark_recorded(path, path in names)
            handle = module.register_forward_hook(after, with_kwargs=True)
            stack.callback(handle.remove)
        if observed is not None:
            stack.callback(model.register_forward_pre_hook(install_late).remove)
        yield
        for path, container, leaves in containers if observed is not None else ():
            if observed is not None and _differ(pytree.tree_flatten(container), leaves):
                observed.setdefault(path, "returns a container that is changed afterwards")


_Leaves = tuple[list[Any], pytree.TreeSpec]


def _keep_container(
    path: str, containers: list[tuple[str, Any, _Leaves]], _: Any, __: Any, result: Any
) -> None:
    if torch.compiler.is_dynamo_compiling():
        return
    leaves = pytree.tree_flatten(result)
    if is_mutable(leaves[1]):
        containers.append((path, result, leaves))


def _mark_recorded(path: str, is_recorded: bool) -> Callable[..., Any]:
    """Return the hook of strict export; it has no module, which export would name by the hook."""

    def after(_: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        return _mark_pass_through(path, args, kwargs, result) if is_recorded else None

    return after


class _Observer:
    """Hooks that observe one module in non-strict export."""

    def __init__(
        self,
        path: str,
        is_recorded: bool,
        containers: list[tuple[str, Any, _Leaves]],
        observed: dict[str, str] | None,
    ) -> None:
        self.path = path
        self.is_recorded = is_recorded
        self.containers = containers
        self.observed = observed if observed is not None else {}
        self.structure: object = None
        self.arguments: list[list[_Leaves]] = []

    # A hook's side effect in a branch would be refused; this function is called while tracing,
    # and not traced.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def note_branch(self) -> None:
        """Record that the module is called in a branch or a loop."""
        self.observed[self.path] = _IN_BRANCH

    def before(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the leaves of the arguments."""
        if not torch.compiler.is_dynamo_compiling():
            values = (*args, *kwargs.values())
            self.arguments.append([pytree.tree_flatten(value) for value in values])

    def after(
        self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Observe one call; return the result with aliases, or None to keep it."""
        if torch.compiler.is_dynamo_compiling():
            self.note_branch()
            return None
        for value, leaves in zip((*args, *kwargs.values()), self.arguments.pop(), strict=True):
            if is_mutable(leaves[1]) and _differ(pytree.tree_flatten(value), leaves):
                self.refuse(f"changes a {type(value).__name__} in place")
        taken, in_spec = pytree.tree_flatten((args, kwargs))
        returned, out_spec = pytree.tree_flatten(result)
        for verb, values in (("takes", taken), ("returns", returned)):
            other = next((leaf for leaf in values if not _is_recordable(leaf)), None)
            if other is not None:
                self.refuse(f"{verb} {_describe(other)}")
        if self.structure not in (None, (in_spec, out_spec)):
            self.refuse("is called with arguments of several structures")
        self.structure = (in_spec, out_spec)
        if not self.is_recorded:
            return None
        if is_mutable(out_spec):
            self.containers.append((self.path, result, (returned, out_spec)))
        return _mark_pass_through(self.path, args, kwargs, result)

    def refuse(self, reason: str) -> None:
        """Record that the signature cannot be recorded."""
        self.observed.setdefault(self.path, reason)


def _mark_pass_through(path: str, args: Any, kwargs: Any, result: Any) -> Any:
    """Return the result with aliases for tensors that are arguments; None if there are none.

    A program has one node for an argument and a result that are the same tensor, and no node of a
    module that only returns its argument.
    """
    is_tensor = torch.Tensor
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, is_tensor)]

    def is_given(leaf: Any) -> bool:
        return isinstance(leaf, is_tensor) and any(leaf is other for other in given)

    if not any(map(is_given, pytree.tree_leaves(result))):
        return None
    return pytree.tree_map(lambda leaf: _alias(leaf, path) if is_given(leaf) else leaf, result)


def _alias(leaf: torch.Tensor, path: str) -> Any:
    # Strict export keeps annotations of nodes, non-strict export must be asked to.
    is_strict = torch.compiler.is_dynamo_compiling()
    keeping = nullcontext() if is_strict else traceback.preserve_node_meta()
    with keeping, traceback.annotate({PASS_THROUGH: path}):
        return torch.ops.aten.alias.default(leaf)


def _differ(one: _Leaves, other: _Leaves) -> bool:
    """Return whether a container has other leaves than before."""
    return one[1] != other[1] or any(
        first is not second and (isinstance(first, torch.Tensor) or first != second)
        for first, second in zip(one[0], other[0], strict=True)
    )


def _is_recordable(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, (torch.Tensor, bool, int, float))


def _describe(leaf: object) -> str:
    if isinstance(leaf, SYMBOLS):
        return "a symbolic number, which export cannot record"
    if isinstance(leaf, str):
        return f"the text {leaf!r}, which export cannot record"
    return f"an object of class {type(leaf).__name__}, which is not a pytree node"


def is_mutable(spec: pytree.TreeSpec) -> bool:
    """Return whether a structure has a mutable container."""
    if spec.is_leaf() or spec.type in {tuple, torch.Size}:
        return any(map(is_mutable, spec.children()))
    return True
