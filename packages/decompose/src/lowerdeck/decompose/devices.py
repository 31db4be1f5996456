"""``on_cpu``: a program as if it had been exported on the CPU, for what knows no other device."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node, map_arg

from lowerdeck.decompose._torch_private import fake_mode_of
from lowerdeck.decompose.calls.facts import TensorFacts, number_key
from lowerdeck.decompose.decomposing import decompose
from lowerdeck.decompose.errors import DecomposeError, WholeProgramError
from lowerdeck.torch_base import (
    FakeTensor,
    FakeTensorMode,
    arguments_of,
    copy_graph_module,
    describe_node,
    graphs_of,
    pytree,
    set_program_parts,
    storage_identity,
    with_graph_module,
)

_ATEN = torch.ops.aten
_CPU = torch.device("cpu")

_NORMS = frozenset(
    {
        _ATEN.native_batch_norm.default,
        _ATEN._native_batch_norm_legit.default,
        _ATEN._native_batch_norm_legit.no_stats,
        _ATEN._native_batch_norm_legit_functional.default,
        _ATEN._native_batch_norm_legit_no_training.default,
        _ATEN.native_layer_norm.default,
        _ATEN.native_group_norm.default,
    }
)
"""Their statistics are of other dtypes or sizes on the CPU."""

_GPU_ATTENTION = frozenset(
    {
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_flash_attention.default,
    }
)
"""What attention is taken apart into on a GPU; the CPU has none of them."""


def on_cpu(exported_program: ExportedProgram) -> ExportedProgram:
    """Return ``exported_program`` as if it had been exported on the CPU.

    Values, weights, example inputs and the devices that operators are given are those of the CPU;
    what shares memory still does. What autocast does depends on the device: in a program with
    regions of it, these are taken apart first, and all writes are said by values then.

    Args:
        exported_program: Any program; not changed, and returned itself if it has no other device.

    Raises:
        DecomposeError: A value is no plain tensor (sparse, quantised), or a region of autocast
            cannot be taken apart.
    """
    return methods_on_cpu({"forward": exported_program})["forward"]


def methods_on_cpu(programs: Mapping[str, ExportedProgram]) -> dict[str, ExportedProgram]:
    """Return programs as ``on_cpu`` does; those that share memory share it there, too.

    Args:
        programs: By name, such as the methods of one file.

    Raises:
        DecomposeError: As ``on_cpu`` does.
    """
    held = _Moved()
    return {name: _moved(program, held) for name, program in programs.items()}


def _moved(program: ExportedProgram, held: _Moved) -> ExportedProgram:
    if all(map(_is_on_cpu, _all_of(program))):
        return program
    if any("autocast" in str(node.target) for node in _nodes(program)):
        program = decompose(program, {})
    module = copy_graph_module(program.graph_module)
    mode = fake_mode_of(module)
    for gm in graphs_of(module):
        for node in gm.graph.nodes:
            _move(node, mode)
        for node in list(gm.graph.nodes):
            if node.target in _GPU_ATTENTION:
                _say_attention(node)
        gm.recompile()
    made = with_graph_module(program, module)
    example = program.example_inputs
    set_program_parts(
        made,
        state_dict={name: held.of(value) for name, value in program.state_dict.items()},
        constants={name: held.of(value) for name, value in program.constants.items()},
        example_inputs=None if example is None else pytree.tree_map(held.of, example),
    )
    return made


def _nodes(program: ExportedProgram) -> Iterator[Node]:
    for gm in graphs_of(program.graph_module):
        yield from gm.graph.nodes


def _all_of(program: ExportedProgram) -> Iterator[Any]:
    """Yield all that may be on a device."""
    yield from (*program.state_dict.values(), *program.constants.values())
    for node in _nodes(program):
        yield from (node.args, node.kwargs, node.meta.get("val"))


def _is_on_cpu(value: Any) -> bool:
    # Every program is asked: no pytree, which takes three times as long.
    if isinstance(value, tuple | list):
        return all(map(_is_on_cpu, value))
    if isinstance(value, dict):
        return all(map(_is_on_cpu, value.values()))
    if isinstance(value, torch.device):
        return value.type == "cpu"
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"


def _move(node: Node, mode: FakeTensorMode) -> None:
    def moved(value: Any) -> Any:
        if _is_on_cpu(value):
            return value
        if isinstance(value, torch.device):
            return _CPU
        if value.is_conj():
            return moved(value.conj()).conj()
        try:
            return replace(TensorFacts.of(value), device=_CPU).input_fake(mode, with_offset=True)
        except WholeProgramError as error:
            raise DecomposeError(
                f"{describe_node(node)} cannot be told of the CPU, for {error}: export the module "
                "after module.cpu(), or keep such tensors out of the program"
            ) from error

    node.args = pytree.tree_map(moved, node.args)
    node.kwargs = pytree.tree_map(moved, dict(node.kwargs))
    if "val" in node.meta:
        node.meta["val"] = pytree.tree_map(moved, node.meta["val"])
    if node.target in _NORMS:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda arg: arg.meta["val"])
        # What it computes lies as before.
        node.meta["val"] = (node.meta["val"][0], *node.target(*args, **kwargs)[1:])
    elif node.target is operator.getitem:
        node.meta["val"] = node.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr]  # a node


def _heads(given: Node) -> Any:
    return number_key(given.meta["val"].shape[-3])


def _say_attention(node: Node) -> None:
    """Replace a call of a GPU's attention whose statistics nobody reads."""
    given = arguments_of(node)
    if given["dropout_p"] or any(user.args[1:] != (0,) for user in node.users):
        return
    query, key = given["query"], given["key"]
    graph = node.graph
    with graph.inserting_before(node):
        made = graph.call_function(
            _ATEN.scaled_dot_product_attention.default,
            (query, key, given["value"], given.get("attn_bias"), 0.0, given["is_causal"]),
            {
                "scale": given["scale"],
                "enable_gqa": _heads(query) != _heads(key),
            },
        )
    made.meta = {**node.meta, "val": node.meta["val"][0]}
    name = made.name
    for user in list(node.users):
        user.replace_all_uses_with(made)
        graph.erase_node(user)
        # An output may be known by it.
        name = user.name
    graph.erase_node(node)
    made.name = name


class _Moved:
    """Tensors on the CPU; what shares memory, or is one tensor, does so there."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        # Held, so that no identity is given to another storage meanwhile.
        self._held: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        """Return ``value`` on the CPU; what is no tensor is given back.

        Args:
            value: A tensor, or anything else.
        """
        if _is_on_cpu(value):
            return value
        identity = storage_identity(value)
        if identity is None or isinstance(value, FakeTensor) or value.is_conj() or value.is_neg():
            return value.to(_CPU)
        storage = self._storages.get(identity)
        if storage is None:
            storage = self._storages[identity] = value.untyped_storage().cpu()
            self._held.append(value)
        made = torch.empty(0, dtype=value.dtype)
        made.set_(storage, value.storage_offset(), value.shape, value.stride())
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=value.requires_grad)
        return made.requires_grad_(value.requires_grad)
