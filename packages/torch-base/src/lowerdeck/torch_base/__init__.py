"""Facts about torch's graphs and programs that several packages need.

The lowest layer: what nodes do besides computing (effects, writes in place, shared memory), and
what is private in torch but needed by more than one package. It replaces nothing of torch.
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
    add_node,
    composite_parts,
    copy_node,
    core_decompositions,
    data_address,
    detect_fake_mode,
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
    mend_readers,
    overload_name,
    plain_number,
    pytree,
    reads_only_earlier,
    reserve_name,
    schema_of,
    set_program_parts,
    size_conditions,
    size_range,
    storage_identity,
    upper_bound,
    varies,
    with_parts,
)
from lowerdeck.torch_base.aliases import MemoryUse, held_tensors, shared_inputs
from lowerdeck.torch_base.arguments import arguments_of
from lowerdeck.torch_base.collector import collector_held
from lowerdeck.torch_base.copies import OwnCopies, copy_module, lazy_clone
from lowerdeck.torch_base.dtypes import DTYPES, MEMORY_FORMATS, SCALAR_TYPES, lies_channels_last
from lowerdeck.torch_base.file_tensors import tensor_in_file
from lowerdeck.torch_base.graphs import (
    attribute_of,
    changed_constant,
    copy_graph_module,
    graphs_of,
    is_getitem,
    mended,
)
from lowerdeck.torch_base.idle_modes import without_idle_modes
from lowerdeck.torch_base.node_effects import Behaviours, writes_in_place
from lowerdeck.torch_base.op_effects import (
    Effect,
    hides_aliases,
    hides_writes,
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
    # What a node does
    "Behaviours",
    "Effect",
    "writes_in_place",
    # What shares memory
    "Extent",
    "MemoryMap",
    "MemoryUse",
    "held_tensors",
    "hides_aliases",
    "hides_writes",
    "returns_alias",
    "returns_view",
    "returns_written",
    "shared_inputs",
    "written_arguments",
    # The bytes of a tensor, and copies that cost nothing until they are written
    "OwnCopies",
    "bytes_of",
    "data_address",
    "copy_module",
    "lazy_clone",
    "storage_identity",
    "tensor_in_file",
    "view_tensor",
    # The numbers that programs keep for dtypes and memory formats
    "DTYPES",
    "MEMORY_FORMATS",
    "SCALAR_TYPES",
    "lies_channels_last",
    # Operators, their schemas and kinds, and what they are taken apart into
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
    # Nodes added, copied and erased at a third of torch's cost; readers that torch forgot
    "add_node",
    "copy_node",
    "erase_nodes_now",
    "mark_impure",
    "reads_only_earlier",
    "is_impure",
    "mended",
    "mend_readers",
    "reserve_name",
    # Programs made of parts, without a copy and without a check, and a check of one
    "changed_constant",
    "set_program_parts",
    "with_parts",
    # torch's own module of trees, tensors without data, and the garbage collector held back
    "FakeTensor",
    "FakeTensorMode",
    "collector_held",
    "detect_fake_mode",
    "enable_python_dispatcher",
    "is_traceable_wrapper_subclass",
    "pytree",
    # What a message and a compiler ask of a node
    "SourceFrame",
    "arguments_of",
    "describe_node",
    "module_path",
    "source_frame",
    "source_frames",
    # Sizes and numbers that vary, asked without a guard
    "SYMBOLS",
    "expression_of",
    "hint_of",
    "plain_number",
    "size_conditions",
    "expression_range",
    "size_range",
    "upper_bound",
    "varies",
    # Graphs in graphs
    "attribute_of",
    "copy_graph_module",
    "graphs_of",
    "is_getitem",
    "without_idle_modes",
]
