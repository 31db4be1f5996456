"""Take one program apart in our way and in torch's, and say in what the results differ.

Only what torch itself cannot do is left out, and that is counted. The judge is torch's result of
the program itself. Where that differs from ours, eager is: torch's functionalisation loses a
conversion or a broadcast of some writes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from lowerdeck.decompose import DecomposeError, decompose, explain
from lowerdeck.decompose.written_names import merge_written_names
from lowerdeck.torch_base import MemoryUse

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/decompose/tests"))
from program_likeness import differences

WELL = frozenset(
    {"same", "lost by torch", "said", "laid", "beyond torch", "wrong in torch", "torch"}
    | {"no export"}
)
"""Outcomes that are no fault of ours."""
LEFT_OUT = frozenset({"torch", "no export"})
"""Outcomes that compare nothing."""
_COPIES = ("aten.copy.default", "aten.clone.default")


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one program.

    Attributes:
        group: What was asked for: ``raw/17``, ``zoo/lstm``.
        program: Which of the group's programs.
        outcome: ``same``; ``lost by torch`` if our result has eager's numbers, and torch's has
            not, gives a buffer another shape, takes one size alone where any is asked, or says
            strides that are not those of the run, where ours are;
            ``said`` if ours is torch's result of the program with
            its aliases said: what eager's dropout returns; ``laid`` if it also copies what torch
            puts in a buffer's place, whose strides are then others;
            ``wrong in torch`` if both have the same wrong numbers; ``beyond torch`` if we can
            take it apart and torch cannot, as it is or with its aliases said, ``torch`` if
            neither can, ``no export`` if there is no program, or eager fails;
            ``refused``, ``differs``, ``wrong`` or ``failed``.
        detail: What differs, or the message.
        whole: Why it went torch's way; empty if it did not.
    """

    group: str
    program: str
    outcome: str
    detail: str = ""
    whole: str = ""


def judge(
    group: str,
    name: str,
    export: Callable[[], ExportedProgram],
    eager: Callable[[], tuple[torch.nn.Module, Sequence[Any]]] | None = None,
) -> Finding:
    """Return what came of one program.

    Args:
        group: As in ``Finding``.
        name: Likewise.
        export: Makes the program, anew each time.
        eager: Makes the module and its inputs anew, where numbers may have to tell.
    """
    try:
        program = export()
        # Tracing tells a program's sizes apart, for whoever traces it next.
        own = export() if program.range_constraints else program
        if eager is not None:
            # What eager refuses, such as a write on itself, export may let pass.
            module, inputs = eager()
            with torch.no_grad():
                module(*inputs)
    except Exception as error:  # noqa: BLE001, RUF100  (what torch cannot export is not ours)
        return Finding(group, name, "no export", _convert_call(error))
    torchs = ExportedProgram.run_decompositions
    try:
        with patch.object(
            ExportedProgram, "run_decompositions", autospec=True, side_effect=torchs
        ) as whole:
            found = decompose(program)
        told = explain(program) if whole.called else None
        reason = "" if told is None else told.reason or "not said"
    except Exception as error:  # noqa: BLE001, RUF100  (an untyped error is what is sought)
        ours, found, reason = _convert_call(error), None, ""
    try:
        expected = own.run_decompositions()
    except Exception as error:  # noqa: BLE001, RUF100  (nor what torch cannot take apart)
        theirs = _convert_call(error)
        if found is None:
            return Finding(group, name, "torch", f"{theirs}; ours: {ours}")
        if eager is None or _numbers(found, eager):
            return Finding(group, name, "beyond torch", theirs, reason)
        outcome = "wrong in torch" if _is_wrong_in_torch(found, export, eager) else "wrong"
        return Finding(group, name, outcome, theirs, reason)
    if found is None:
        outcome = "refused" if ours.startswith(DecomposeError.__name__) else "failed"
        return Finding(group, name, outcome, ours)
    if told is not None and told.failed:
        # Torch's own way hid an error of a call.
        return Finding(group, name, "failed", reason, reason)
    unlike = differences(found, expected)
    said = "; ".join(unlike)[:1000]
    right = eager is None or _numbers(found, eager)
    if not right:
        wrong = f"wrong numbers; {said or 'as torch has them'}"
        in_torch = not unlike or _is_wrong_in_torch(found, export, eager)
        return Finding(group, name, "wrong in torch" if in_torch else "wrong", wrong, reason)
    if not unlike:
        return Finding(group, name, "same", "", reason)
    if (
        _misshapes(expected)
        or _fixes(expected, found)
        or (_lies_otherwise(expected) and not _lies_otherwise(found))
        or (eager is not None and not _numbers(expected, eager))
    ):
        return Finding(group, name, "lost by torch", said, reason)
    try:
        once_said = unlike if eager is None else differences(found, _said_by_torch(export()))
    except RuntimeError as error:
        # Its control flow refuses two names for one memory, as an idle dropout's result has.
        return Finding(group, name, "beyond torch", f"{_convert_call(error)}; {said}", reason)
    if not once_said:
        return Finding(group, name, "said", said, reason)
    # Torch puts what is copied to a buffer in its place, whose strides are then others.
    if (
        _are_copies(unlike)
        or _are_copies(once_said)
        or not differences(_laid_by_torch(found), expected)
        or not differences(_laid_by_torch(found, alike=True), expected)
    ):
        return Finding(group, name, "laid", said, reason)
    return Finding(group, name, "differs", said, reason)


def _are_copies(unlike: Sequence[str]) -> bool:
    """Return whether all that a program has more than torch's are copies."""
    return all(one.startswith("+ ") and any(map(one.__contains__, _COPIES)) for one in unlike)


def _fixes(program: ExportedProgram, other: ExportedProgram) -> bool:
    """Return whether a program takes inputs of one size alone where another takes any."""
    given = {one.name: one.meta.get("val") for one in other.graph.find_nodes(op="placeholder")}
    return any(
        _is_fixed(size) and not _is_fixed(free)
        for one in program.graph.find_nodes(op="placeholder")
        if isinstance(one.meta.get("val"), torch.Tensor) and one.name in given
        for size, free in zip(one.meta["val"].shape, given[one.name].shape, strict=False)
    )


def _is_fixed(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) or size.node.maybe_as_int() is not None


def _misshapes(program: ExportedProgram) -> bool:
    """Return whether a program gives a buffer the wrong shape or dtype: torch lost a copy."""
    held = {**program.state_dict, **program.constants}
    nodes = program.graph.output_node().args[0]
    return any(
        "MUTATION" in spec.kind.name
        and spec.target in held
        and (node.meta["val"].shape, node.meta["val"].dtype)
        != (held[spec.target].shape, held[spec.target].dtype)
        for spec, node in zip(program.graph_signature.output_specs, nodes, strict=True)
    )


def _lies_otherwise(program: ExportedProgram) -> bool:
    """Return whether a tensor has other strides when the program runs than the program says."""
    args, kwargs = copy.deepcopy(program.example_inputs)
    given = iter(pytree.tree_leaves((args, kwargs)))
    held = copy.deepcopy({**program.state_dict, **program.constants})
    inputs = [
        next(given) if spec.kind is InputKind.USER_INPUT else held[spec.target]
        for spec in program.graph_signature.input_specs
    ]
    running = _Running(program.graph_module)
    try:
        running.run(*inputs)
    except RuntimeError:
        # A view that the strides of the run do not allow.
        return True
    return running.lies_otherwise


class _Running(Interpreter):
    """Runs a graph, and compares how tensors lie with what the graph says.

    Attributes:
        lies_otherwise: Whether one lies otherwise; of symbolic strides nothing is known.
    """

    lies_otherwise = False

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        if n.op == "call_function":
            pairs = zip(*map(pytree.tree_leaves, (found, n.meta.get("val"))), strict=False)
            self.lies_otherwise |= any(_lie_otherwise(*pair) for pair in pairs)
        return found


def _lie_otherwise(found: Any, said: Any) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(said, torch.Tensor):
        return False
    if found.layout is not torch.strided or not found.numel():
        return False
    long = [dim for dim in range(found.dim()) if found.shape[dim] != 1]
    pairs = [(found.stride(dim), said.stride(dim)) for dim in long]
    return any(isinstance(other, int) and one != other for one, other in pairs)


def _laid_by_torch(program: ExportedProgram, *, alike: bool = False) -> ExportedProgram:
    """Return a program in which what is copied as it is, but for its strides, is read itself.

    Copies to an input of the user are torch's too, and those that change no strides: of a value to
    a part of a tensor. Where what is copied to an input is copied back, torch has neither copy.

    Args:
        program: Ours; not changed.
        alike: Whether those copies, too, are read through.
    """
    made = copy.deepcopy(program)
    inputs = set(made.graph_signature.user_inputs_to_mutate)
    for node in made.graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default):
        source = node.args[1]
        one, other = node.meta["val"], source.meta["val"]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            continue
        if alike or (one.stride() != other.stride() and node.name not in inputs):
            node.replace_all_uses_with(source)
            node.graph.erase_node(node)
    return made


def _said_by_torch(program: ExportedProgram) -> ExportedProgram:
    return merge_written_names(program, MemoryUse.of_program(program)).run_decompositions()


def _is_wrong_in_torch(found: ExportedProgram, export: Any, eager: Any) -> bool:
    """Return whether torch's result of the program with its aliases said has the same numbers."""
    try:
        theirs = _said_by_torch(export())
    except Exception:  # noqa: BLE001, RUF100  (torch may fail on it, in any way)
        return False
    return _numbers(found, lambda: (theirs.module(), eager()[1]))


def _numbers(
    program: ExportedProgram, eager: Callable[[], tuple[torch.nn.Module, Sequence[Any]]]
) -> bool:
    """Return whether a program computes what eager does, and leaves the same behind, twice."""
    module, inputs = eager()
    # Modules of one program share its state.
    own = copy.deepcopy(program).module()
    given = [pytree.tree_map_only(torch.Tensor, torch.clone, inputs) for _ in range(2)]
    for time in range(2):
        with torch.no_grad():
            try:
                expected = pytree.tree_leaves(module(*given[0]))
            except RuntimeError:
                if not time:
                    raise
                return True  # what the first call left behind is no input for it
            try:
                found = pytree.tree_leaves(own(*given[1]))
            except RuntimeError:
                return False
        left = [pytree.tree_leaves(each) for each in given]
        if not _alike((*found, *left[1]), (*expected, *left[0])):
            return False
    buffers = dict(own.named_buffers())
    pairs = [(buffers[name], one) for name, one in module.named_buffers() if name in buffers]
    return _alike([one for one, _ in pairs], [other for _, other in pairs])


def _alike(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(_equal, found, expected))


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(other, torch.Tensor):
        return bool(one == other)
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if other.is_complex() or not other.is_floating_point():
        return bool(torch.allclose(one, other, equal_nan=True))
    return torch.allclose(one.double(), other.double(), atol=1e-4, rtol=1e-4, equal_nan=True)


def _convert_call(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
