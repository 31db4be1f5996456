"""The zoo is consistent: names, tags, inputs, and the traits that exported programs show."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from lowerdeck_zoo import PROGRAMS, TAGS, Program, programs

EXPORTED = programs(without="large")


def test_names_are_unique_and_tags_known() -> None:
    names = [one.name for one in PROGRAMS]
    assert len(set(names)) == len(names)
    assert {tag for one in PROGRAMS for tag in one.tags.split()} <= set(TAGS)
    with pytest.raises(ValueError, match="expected some of"):
        programs("statefull")


def test_importing_it_builds_nothing() -> None:
    code = (
        "import torch\n"
        "def fail(*_, **__): raise AssertionError('a module or tensor is built at import')\n"
        "torch.nn.Module.__init__ = torch.randn = torch.rand = torch.zeros = fail\n"
        "import lowerdeck_zoo"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("program", EXPORTED, ids=str)
def test_each_program_has_three_different_calls(program: Program) -> None:
    calls = program.calls()
    assert len(calls) >= 3
    assert {call.method for call in calls} == set(program.methods)
    drawn = [repr([(call.method, call.flat) for call in [one]]) for one in calls if one.flat]
    assert len(set(drawn)) == len(drawn)


def _nodes(exported: ExportedProgram) -> Iterator[torch.fx.Node]:
    for module in exported.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


def _values(exported: ExportedProgram) -> Iterator[torch.Tensor]:
    for node in _nodes(exported):
        leaves = pytree.tree_leaves(node.meta.get("val"))
        yield from (one for one in leaves if isinstance(one, torch.Tensor))


def _writes(exported: ExportedProgram) -> set[str]:
    specs = exported.run_decompositions({}).graph_signature.output_specs
    return {spec.kind.name for spec in specs}


def _is_symbolic(value: torch.Tensor) -> bool:
    return any(not isinstance(size, int) for size in value.shape)


def _is_shared(exported: ExportedProgram) -> bool:
    parameters = set(exported.graph_signature.inputs_to_parameters)
    read_twice = [
        node
        for node in exported.graph.find_nodes(op="placeholder")
        if node.name in parameters and len(node.users) > 1
    ]
    storages = [one.untyped_storage()._cdata for one in exported.state_dict.values()]
    return bool(read_twice) or len(set(storages)) < len(storages)


def _is_quantised(exported: ExportedProgram) -> bool:
    weights = {one.dtype for one in exported.state_dict.values()} & {torch.int8, torch.uint8}
    return bool(weights) or any("quantized_decomposed" in str(n.target) for n in _nodes(exported))


HALF = {torch.float16, torch.bfloat16}
TRAITS: dict[str, Callable[[ExportedProgram], bool]] = {
    "complex": lambda one: any(value.is_complex() for value in _values(one)),
    "control-flow": lambda one: any(
        getattr(node.target, "__name__", "") in {"cond", "while_loop", "map_impl", "scan"}
        for node in _nodes(one)
    ),
    "dynamic": lambda one: any(map(_is_symbolic, _values(one))),
    "half": lambda one: any(value.dtype in HALF for value in _values(one)),
    "in-place": lambda one: any(
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        # Export detaches what ``torch.tensor`` makes in place.
        and node.target is not torch.ops.aten.detach_.default
        for node in _nodes(one)
    ),
    "quantised": _is_quantised,
    "shared-weights": _is_shared,
    "stateful": lambda one: OutputKind.BUFFER_MUTATION.name in _writes(one),
}


@pytest.mark.parametrize("program", EXPORTED, ids=str)
def test_traits_are_those_of_the_exported_program(program: Program) -> None:
    shown = {
        tag for tag, is_shown in TRAITS.items() if any(map(is_shown, program.exports().values()))
    }
    assert shown == {tag for tag in program.tags.split() if tag in TRAITS}
    assert program.has("several-methods") == (len(program.methods) > 1)
