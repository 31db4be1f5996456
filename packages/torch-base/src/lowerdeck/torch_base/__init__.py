"""Analyses of torch graphs and programs that several packages need.

The lowest layer: effects, mutations and aliases of nodes, and private torch APIs that more than
one package uses.
"""

from __future__ import annotations

from lowerdeck.torch_base._torch_private import (
    SYMBOLS,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    LazyGraphModule,
    OperatorBase,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    add_node,
    assume_constant_result,
    composite_parts,
    copy_graph,
    copy_node,
    core_decompositions,
    data_address,
    detect_fake_mode,
    empty_fake,
    enable_python_dispatcher,
    erase_nodes_now,
    executorch_call_delegate,
    expression_of,
    expression_range,
    find_schema,
    hint_of,
    is_impure,
    is_traceable_wrapper_subclass,
    mark_impure,
    new_fake,
    overload_name,
    plain_number,
    pytree,
    reads_only_earlier,
    reserve_name,
    restore_users,
    schema_of,
    set_program_parts,
    size_range,
    storage_identity,
    upper_bound,
    varies,
    with_parts,
)
from lowerdeck.torch_base.aliases import MemoryUse, shared_inputs, state_tensors
from lowerdeck.torch_base.arguments import arguments_of
from lowerdeck.torch_base.collector import collector_held
from lowerdeck.torch_base.copies import OwnCopies, copy_module, lazy_clone
from lowerdeck.torch_base.dtypes import DTYPES, MEMORY_FORMATS, SCALAR_TYPES, is_channels_last
from lowerdeck.torch_base.file_tensors import tensor_in_file
from lowerdeck.torch_base.graphs import (
    attribute_of,
    changed_constant,
    copy_graph_module,
    graphs_of,
    is_getitem,
    renamed_outputs,
    repair_program,
)
from lowerdeck.torch_base.node_effects import Behaviours, writes_in_place
from lowerdeck.torch_base.noop_modes import remove_noop_mode_regions
from lowerdeck.torch_base.op_effects import (
    Effect,
    hides_effects,
    returns_alias,
    returns_view,
    returns_written,
    written_arguments,
)
from lowerdeck.torch_base.sources import (
    SourceFrame,
    describe_node,
    module_path,
    source_frame,
    source_frames,
)
from lowerdeck.torch_base.storage import Extent, MemoryMap
from lowerdeck.torch_base.tensor_bytes import bytes_of, view_tensor

__all__ = [
    # Effects of nodes
    "Behaviours",
    "Effect",
    "writes_in_place",
    # Aliases
    "Extent",
    "MemoryMap",
    "MemoryUse",
    "state_tensors",
    "hides_effects",
    "returns_alias",
    "returns_view",
    "returns_written",
    "shared_inputs",
    "written_arguments",
    # Bytes and lazy copies of tensors
    "OwnCopies",
    "bytes_of",
    "data_address",
    "copy_module",
    "lazy_clone",
    "storage_identity",
    "tensor_in_file",
    "view_tensor",
    # Numeric codes of dtypes and memory formats
    "DTYPES",
    "MEMORY_FORMATS",
    "SCALAR_TYPES",
    "is_channels_last",
    # Operators, their schemas, kinds and decompositions
    "HigherOrderOperator",
    "LazyGraphModule",
    "OperatorBase",
    "OpOverload",
    "OpOverloadPacket",
    "composite_parts",
    "core_decompositions",
    "executorch_call_delegate",
    "find_schema",
    "overload_name",
    "schema_of",
    # Fast ways to add, copy and erase nodes; users that torch lost
    "add_node",
    "copy_graph",
    "copy_node",
    "erase_nodes_now",
    "mark_impure",
    "reads_only_earlier",
    "is_impure",
    "repair_program",
    "restore_users",
    "reserve_name",
    # Programs with replaced parts, and a check of constants
    "changed_constant",
    "renamed_outputs",
    "set_program_parts",
    "with_parts",
    # pytree, fake tensors, dispatch modes, tracing, and the garbage collector
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "assume_constant_result",
    "collector_held",
    "detect_fake_mode",
    "empty_fake",
    "enable_python_dispatcher",
    "is_traceable_wrapper_subclass",
    "pytree",
    # Source lines, modules and arguments of nodes
    "SourceFrame",
    "arguments_of",
    "describe_node",
    "module_path",
    "source_frame",
    "source_frames",
    # Symbolic sizes, without guards
    "SYMBOLS",
    "expression_of",
    "hint_of",
    "new_fake",
    "plain_number",
    "expression_range",
    "size_range",
    "upper_bound",
    "varies",
    # Nested graphs
    "attribute_of",
    "copy_graph_module",
    "graphs_of",
    "is_getitem",
    "remove_noop_mode_regions",
]
