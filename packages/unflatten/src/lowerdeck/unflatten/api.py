"""Convert an ``ExportedProgram`` to a module hierarchy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from lowerdeck.torch_base import collector_held, repair_program
from lowerdeck.unflatten._torch_private import is_decomposed
from lowerdeck.unflatten.body import Body
from lowerdeck.unflatten.build import ModuleBuilder, install_state
from lowerdeck.unflatten.build import restore_types as restore_eager_types
from lowerdeck.unflatten.call_signature import CallSignature, FlatArgsAdapter, argument_variables
from lowerdeck.unflatten.contract import RecordedCall, root_guards
from lowerdeck.unflatten.cut.cutting import cut
from lowerdeck.unflatten.cut.graphs import GraphBuilder
from lowerdeck.unflatten.cut.signatures import (
    DECOMPOSED,
    NO_SIGNATURE,
    find_preserved_calls,
    preserve_flat_calls,
    program_signature,
    read_arguments_directly,
)
from lowerdeck.unflatten.cut.sizes import localize_sizes
from lowerdeck.unflatten.cut.working_graph import ProgramCopier, WorkingGraph, attribute_modules
from lowerdeck.unflatten.errors import UnsupportedProgramError
from lowerdeck.unflatten.module import UnflattenedModule, class_with
from lowerdeck.unflatten.trace import Trace, trace_program
from lowerdeck.unflatten.trace.mutations import Mutations

T = TypeVar("T")


def unflatten(
    module: ExportedProgram,
    flat_args_adapter: FlatArgsAdapter | None = None,
    *,
    inplace: bool = True,
    preserve: Literal["all"] | None = None,
    restore_types: bool | torch.nn.Module = False,
) -> UnflattenedModule:
    """Return a module equivalent to the program, with the eager module's hierarchy.

    Submodules, parameters, buffers and constants keep eager's names, order and sharing. The
    program is neither changed nor kept alive; its memory is shared copy-on-write.

    Args:
        module: The program; torch's function has this parameter name.
        flat_args_adapter: Converts arguments of another pytree structure to the exported one.
        inplace: Write mutated buffers and inputs in their owning modules, as eager does. Otherwise
            graphs stay functional, and the root's code writes back at its end.
        preserve: With ``"all"``, children without a recorded signature get a signature of flat
            values in order of first use, so that they can be called alone and replaced.
        restore_types: Make each child also an instance of its eager class, if that class is
            loaded; given the eager module, also copy plain attributes of its children.

    Returns:
        The root module, called like the eager one.

    Raises:
        UnsupportedProgramError: The program is not an ``ExportedProgram``, it has a backward
            signature, effect tokens, no signature of the root, nodes out of topological order or
            guards that cannot be parsed, or an option is invalid.

    Example:
        >>> import torch
        >>> eager = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> module = unflatten(torch.export.export(eager, (torch.ones(1, 2),)))
        >>> [name for name, _ in module.named_modules()]
        ['', '0', '1']
    """
    if not isinstance(module, ExportedProgram):
        raise UnsupportedProgramError(
            f"expected an ExportedProgram; found a {type(module).__name__}. Create one with "
            "torch.export.export(model, args)."
        )
    if module.graph_signature.backward_signature is not None:
        raise UnsupportedProgramError(
            "expected a program without a backward signature; found a joint forward-backward "
            "graph. Export the forward pass alone."
        )
    if module.graph_signature.input_tokens:
        raise UnsupportedProgramError(
            "found effect tokens, which run_decompositions() adds for operators with effects: "
            "unflatten the program before run_decompositions()."
        )
    if preserve not in (None, "all"):
        raise UnsupportedProgramError(
            f"expected preserve='all' or None; found {preserve!r}. To record the signatures of "
            "some modules, export with preserve_module_call_signature."
        )
    if not isinstance(restore_types, (bool, torch.nn.Module)):
        raise UnsupportedProgramError(
            f"expected restore_types to be True, False or the eager module; found "
            f"{restore_types!r}."
        )
    with collector_held():
        program = repair_program(module)
        root, modules = _build(program, flat_args_adapter, inplace, preserve == "all")
    if restore_types:
        eager = restore_types if isinstance(restore_types, torch.nn.Module) else None
        restore_eager_types(modules, eager)
    return root


def _build(
    program: ExportedProgram,
    adapter: FlatArgsAdapter | None,
    inplace: bool,
    preserve_all: bool,
) -> tuple[UnflattenedModule, Mapping[str, torch.nn.Module]]:
    trace = trace_program(program, inplace=inplace)
    working = _copy(trace, preserve_all=preserve_all)
    plan, regions = cut(working)
    graphs = GraphBuilder(working, plan, regions)
    reason = DECOMPOSED if is_decomposed(program) else NO_SIGNATURE
    builder = ModuleBuilder(graphs, trace.paths, reason)
    builder.share()
    root = _root(trace, graphs, builder, adapter)
    modules = builder.build(root)
    install_state(modules, trace.state, trace.paths)
    trace.tree.release()
    return root, modules


def _copy(trace: Trace, *, preserve_all: bool) -> WorkingGraph:
    copier = ProgramCopier(trace)
    working = copier.copy()
    find_preserved_calls(trace, copier)
    copier.copy_output()
    read_arguments_directly(working)
    if preserve_all:
        preserve_flat_calls(working)
    localize_sizes(working)
    return working


def _root(
    trace: Trace,
    graphs: GraphBuilder,
    builder: ModuleBuilder,
    adapter: FlatArgsAdapter | None,
) -> UnflattenedModule:
    program, working, frame = trace.program, graphs.working, trace.tree.root
    signature = _signature(program, working, adapter, trace.mutations)
    body = Body(
        "",
        partial(graphs.build, frame),
        signature,
        attribute_modules(frame.nodes, working.attributes),
        frame.type_name,
        calls=[RecordedCall(working.inputs)],
        guards=root_guards(program, working.inputs, signature),
    )
    builder.add_sites(frame, body.sites)
    root: UnflattenedModule = class_with(UnflattenedModule, body, [body.function()])(body)
    root.__dict__.update(
        graph_signature=_copy_signature(program.graph_signature),
        module_call_graph=[_shallow_copy(entry) for entry in program.module_call_graph],
        range_constraints=dict(program.range_constraints),
        flat_args_adapter=adapter,
        meta=dict(program.graph_module.meta),
    )
    return root


def _signature(
    program: ExportedProgram,
    working: WorkingGraph,
    adapter: FlatArgsAdapter | None,
    mutations: Mutations,
) -> CallSignature:
    signature: Any = program_signature(program)
    if signature is None:
        raise UnsupportedProgramError(
            "expected a recorded signature of the outermost module; found none. Export the model "
            "with torch.export.export."
        )
    known = getattr(signature, "forward_arg_names", None)
    names, is_valid = argument_variables(signature.in_spec, known)
    return CallSignature(
        signature.in_spec,
        signature.out_spec,
        names,
        is_variadic=adapter is not None or not is_valid,
        updates=() if mutations.inplace else tuple(_updates(working, mutations)),
    )


def _updates(working: WorkingGraph, mutations: Mutations) -> Iterator[tuple[str | None, int]]:
    inputs = [node.name for node in working.inputs]
    for mutation in mutations.all:
        if mutation.target.name in inputs:
            yield None, inputs.index(mutation.target.name)
        else:
            yield str(mutation.spec.target), 0


def _copy_signature(signature: ExportGraphSignature) -> ExportGraphSignature:
    """Return a copy that is unaffected by later changes to the program's signature."""
    return ExportGraphSignature(
        [_shallow_copy(spec) for spec in signature.input_specs],
        [_shallow_copy(spec) for spec in signature.output_specs],
    )


def _shallow_copy(value: T) -> T:
    """Return a shallow copy, faster than ``copy.copy``."""
    copied = object.__new__(type(value))
    copied.__dict__.update(vars(value))
    return copied
