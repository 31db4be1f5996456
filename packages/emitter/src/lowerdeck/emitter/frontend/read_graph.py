"""Convert an exported graph to the functional IR, in one walk and without retracing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from lowerdeck.emitter.bounds import names_of
from lowerdeck.emitter.errors import InvalidDelegateError, UnsupportedError
from lowerdeck.emitter.frontend.delegates import LoweredModule
from lowerdeck.emitter.frontend.state_sharing import MUTATIONS, StateView, StateViews
from lowerdeck.emitter.frontend.tensors import ValueFactory, layout_of
from lowerdeck.emitter.ir.assertions import is_assertion
from lowerdeck.emitter.ir.graph import (
    Block,
    Call,
    Cond,
    Delegate,
    Method,
    Operation,
    Scan,
    While,
    WriteBack,
)
from lowerdeck.emitter.ir.values import Role, TensorValue, Value
from lowerdeck.torch_base import (
    SYMBOLS,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    describe_node,
    executorch_call_delegate,
    pytree,
    schema_of,
)

_HIGHER_ORDER = torch.ops.higher_order


def read_method(
    name: str,
    exported: ExportedProgram,
    *,
    plan_inputs: bool = True,
    states: StateViews = MappingProxyType({}),
) -> Method:
    """Return the functional IR of an exported program.

    Args:
        exported: A program whose graph is functional.
        plan_inputs: Whether inputs get planned memory; otherwise the caller provides it.
        states: Mutable state of the program's methods, from :func:`find_states`.

    Raises:
        UnsupportedError: If the file format or the runtime does not support a part of it.
        UnboundedSizeError: If a size has no upper bound.
    """
    return _Reader(name, exported, plan_inputs, states).read()


class _Reader:
    """Reader of one graph and the graphs nested in it."""

    def __init__(
        self,
        name: str,
        exported: ExportedProgram,
        plan_inputs: bool,
        states: StateViews,
    ) -> None:
        self._states = states
        self._name = name
        self._plan_inputs = plan_inputs
        self._exported = exported
        self._factory = ValueFactory(name, names_of(exported.graph), exported.range_constraints)
        self._env: dict[fx.Node, Any] = {}
        self._memories: dict[str, TensorValue] = {}

    def read(self) -> Method:
        exported = self._exported
        mutated = {
            spec.target for spec in exported.graph_signature.output_specs if spec.kind in MUTATIONS
        }
        inputs: list[Any] = []
        targets: dict[str, Any] = {}
        placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
            # Effect tokens only order calls, and steps keep the graph's order.
            value = (
                None if spec.kind is InputKind.TOKEN else self._placeholder(node, spec, mutated)
            )
            self._env[node] = value
            if spec.kind is InputKind.TOKEN:
                continue
            if spec.kind is InputKind.USER_INPUT:
                inputs.append(value)
                targets[node.name] = value
            elif spec.target is not None:
                targets[spec.target] = value
        block = Block()
        results = self._walk(exported.graph_module, block)
        outputs: list[Any] = []
        write_backs: list[WriteBack] = []
        for result, value in zip(exported.graph_signature.output_specs, results, strict=True):
            if result.kind is OutputKind.USER_OUTPUT:
                outputs.append(value)
            elif result.kind is OutputKind.TOKEN:
                continue
            elif result.kind in MUTATIONS:
                target = targets[str(result.target)]
                write_backs.append(WriteBack(target, self._as_written(target, value, block)))
            else:
                raise UnsupportedError(
                    f"method {self._name!r}: output {result.arg} is a {result.kind.name}; only "
                    "user outputs and mutations can be emitted: export the model for inference"
                )
        call = exported.call_spec
        return Method(
            *(self._name, inputs, outputs, block, write_backs),
            *(call.in_spec, call.out_spec, exported.range_constraints),
        )

    def _as_written(self, target: Any, value: Any, block: Block) -> Any:
        """Return the value that ``target.copy_(value)`` leaves in ``target``.

        torch's functionalization may omit the dtype conversion and broadcast of a write.
        """
        both = isinstance(target, TensorValue) and isinstance(value, TensorValue)
        if not both or (target.dtype, target.shape) == (value.dtype, value.shape):
            return value
        written = target.like(f"{target.name}.written")
        block.body.append(
            Call(torch.ops.aten.copy.default, [target, value, False], [written], None)
        )
        return written

    def _placeholder(self, node: fx.Node, spec: Any, mutated: set[str | None]) -> Any:
        meta = node.meta.get("val")
        if spec.kind is InputKind.USER_INPUT:
            if isinstance(meta, torch.Tensor):
                value = self._factory.tensor(node.name, meta, order=layout_of(meta))
                # The caller observes a mutation only in its own memory.
                caller = node.name in mutated or not self._plan_inputs
                value.fixed_role = Role.CALLER if caller else Role.INPUT
                return value
            if isinstance(meta, SYMBOLS):
                raise UnsupportedError(
                    f"method {self._name!r}: input {node.name!r} is a dynamic number, but the "
                    "runtime accepts only the traced value: pass a 0-dim tensor and call item() "
                    "on it in the model"
                )
            # A number, None or text: its value at export is a constant of the program.
            return meta if meta is not None else getattr(spec.arg, "value", None)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            tensor = self._bytes_of(spec)
            key = spec.target if spec.target else node.name
            value = self._factory.constant(node.name, tensor, key)
            view = self._states.get((self._name, key), StateView(key) if key in mutated else None)
            if view is not None:
                self._make_state(value, view)
            return value
        raise UnsupportedError(
            f"method {self._name!r}: input {node.name!r} is a {spec.kind.name}, which the "
            "file format cannot represent: remove the effect or the custom object from the model"
        )

    def _make_state(self, value: TensorValue, view: StateView) -> None:
        value.state, value.fixed_role, value.key = True, Role.STATE, view.key
        if view.memory is None:
            return
        if view.key not in self._memories:
            memory = self._factory.constant(f"{view.key}.memory", view.memory, view.key)
            memory.state, memory.fixed_role = True, Role.STATE
            self._memories[view.key] = memory
        value.constant = None
        value.base, value.base_offset = self._memories[view.key], view.offset

    def _bytes_of(self, spec: Any) -> torch.Tensor:
        exported = self._exported
        tensor = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedError(
                f"method {self._name!r}: the program has no tensor for {spec.target!r}"
            )
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            raise UnsupportedError(
                f"method {self._name!r}: {spec.target!r} is a "
                f"{'meta' if tensor.is_meta else 'fake'} tensor: export the model with its weights"
            )
        return tensor

    def _walk(self, module: fx.GraphModule, block: Block) -> list[Any]:
        """Append the operations of ``module`` to ``block``; return its results."""
        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                results = fx.map_arg(node.args[0], self._env.__getitem__)
                return list(results) if isinstance(results, (list, tuple)) else [results]
            if node.op == "get_attr":
                self._env[node] = self._attribute(module, node)
                continue
            if node.op != "call_function":
                raise UnsupportedError(
                    f"method {self._name!r}: node {node.name!r} is a {node.op}; expected only "
                    "placeholder, get_attr, call_function and output, as in an exported graph"
                )
            if node.target is operator.getitem:
                source, index = node.args
                self._env[node] = self._env[source][index]
                continue
            operation, result = self._operation(node)
            self._env[node] = result
            block.body.append(operation)
        raise UnsupportedError(f"method {self._name!r}: a graph has no output node")

    def _attribute(self, module: fx.GraphModule, node: fx.Node) -> Any:
        attribute = operator.attrgetter(str(node.target))(module)
        if isinstance(attribute, torch.Tensor):
            return self._factory.constant(node.name, attribute)
        return attribute

    def _operation(self, node: fx.Node) -> tuple[Operation, Any]:
        reader = self._structured().get(node.target)
        if reader is not None:
            operation = reader(node)
            return operation, list(operation.outs)
        if node.target is executorch_call_delegate:
            return self._delegate(node)
        if node.target is _HIGHER_ORDER.with_effects:
            _, target, *args = self._look_up(node.args)
            result, _ = self._results(node)
            args = self._by_schema(target, args, node.kwargs)
            outs = [value for value in result[1:] if value is not None]
            return Call(target, args, outs, node, effect=not is_assertion(target)), result
        if node.target is _HIGHER_ORDER.auto_functionalized_v2:
            return self._rewriting(node)
        args = self._arguments(node)
        if node.target is torch.ops.aten.masked_select.default:
            # torch bounds the result by the first argument only, although both are broadcast.
            most = _broadcast_size(args[0].sizes, args[1].sizes)
            self._factory.limit(node.meta["val"].shape[0], most)
        result, outs = self._results(node)
        return Call(node.target, args, outs, node), result

    def _rewriting(self, node: fx.Node) -> tuple[Operation, Any]:
        """Return the functional call of a custom operator that mutates whole tensors.

        torch identifies each mutated argument by its index in ``_all_bases``. The node returns the
        operator's results, then the new values; it has further keyword arguments for views.
        """
        target: Any = node.args[0]
        keywords: dict[str, Any] = dict(node.kwargs)
        bases = self._look_up(keywords.pop("_all_bases"))
        args: list[Any] = []
        places: dict[int, int] = {}
        for argument in schema_of(target).arguments:
            name = f"_{argument.name}"
            if argument.name in keywords:
                args.append(self._look_up(keywords.pop(argument.name)))
            elif f"{name}_base_index" in keywords:
                place = keywords.pop(f"{name}_base_index")
                keywords.pop(f"{name}_alias", None)
                if place is not None and places.setdefault(place, len(args)) != len(args):
                    raise self._cannot_write(node, "one tensor under two names")
                args.append(None if place is None else bases[place])
            else:
                args.append(argument.default_value)
        if keywords:
            raise self._cannot_write(node, "a view or a list of tensors")
        result, outs = self._results(node)
        outs = [value for value in outs if value is not None]
        rewritten = tuple(places[place] for place in range(len(bases)))
        return Call(target, args, outs, node, rewritten=rewritten), result

    def _cannot_write(self, node: fx.Node, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"method {self._name!r}: {describe_node(node)}: {node.args[0]} writes {reason}, "
            "expected whole tensors without aliases: pass clones and copy them back in the model"
        )

    def _structured(self) -> dict[Any, Callable[[fx.Node], Operation]]:
        return {
            _HIGHER_ORDER.cond: self._cond,
            _HIGHER_ORDER.while_loop: self._while,
            _HIGHER_ORDER.map_impl: self._scan,
            _HIGHER_ORDER.scan: self._scan,
        }

    def _look_up(self, argument: Any) -> Any:
        return fx.map_arg(argument, self._env.__getitem__)

    def _arguments(self, node: fx.Node) -> list[Any]:
        args = list(self._look_up(node.args))
        if not isinstance(node.target, OpOverload):
            if isinstance(node.target, HigherOrderOperator):
                raise UnsupportedError(
                    f"method {self._name!r}: node {node.name!r} calls the higher-order operator "
                    f"{node.target}, which cannot be emitted"
                )
            return args
        return self._by_schema(node.target, args, node.kwargs)

    def _by_schema(self, target: Any, args: list[Any], kwargs: Any) -> list[Any]:
        keywords = self._look_up(kwargs)
        for argument in schema_of(target).arguments[len(args) :]:
            args.append(keywords.get(argument.name, argument.default_value))
        return args

    def _results(self, node: fx.Node) -> tuple[Any, list[Value]]:
        """Return the node's value for later nodes, and the flat list of result values."""
        meta = node.meta.get("val")
        if isinstance(meta, (list, tuple)):
            results = [
                self._factory.value(f"{node.name}.{index}", item)
                for index, item in enumerate(meta)
            ]
            return results, results
        value = self._factory.value(node.name, meta)
        return value, [] if meta is None else [value]

    def _delegate(self, node: fx.Node) -> tuple[Operation, Any]:
        module, *args = self._look_up(node.args)
        if not isinstance(module, LoweredModule):
            raise InvalidDelegateError(
                f"method {self._name!r}: node {node.name!r} calls a {type(module).__name__}; a "
                "lowered module has backend_id, processed_bytes and compile_specs"
            )
        result, outs = self._results(node)
        return Delegate(module, pytree.tree_leaves(args), outs, node), result

    def _sub_block(self, module: fx.GraphModule, arguments: Sequence[Any]) -> Block:
        """Return the block of an inner graph whose inputs are ``arguments``."""
        inner = [node for node in module.graph.nodes if node.op == "placeholder"]
        for node, value in zip(inner, arguments, strict=True):
            self._env[node] = value
        block = Block()
        block.results = pytree.tree_leaves(self._walk(module, block))
        return block

    def _fresh(self, name: str, templates: Sequence[Any]) -> list[Any]:
        """Return new values like ``templates``: fake tensors or numbers."""
        return [self._factory.value(f"{name}.{i}", item) for i, item in enumerate(templates)]

    def _cond(self, node: fx.Node) -> Operation:
        predicate, on_true, on_false, *optional_operands = self._look_up(node.args)
        operands = optional_operands[0] if optional_operands else []
        branches = (self._sub_block(on_true, operands), self._sub_block(on_false, operands))
        meta = node.meta["val"]
        outs = self._fresh(node.name, meta if isinstance(meta, (list, tuple)) else [meta])
        return Cond(predicate, branches, outs, node)

    def _while(self, node: fx.Node) -> Operation:
        condition, body, initial, *optional_operands = self._look_up(node.args)
        extra = optional_operands[0] if optional_operands else ()
        metas = node.meta["val"]
        carried = self._fresh(node.name, metas)
        for index, value in enumerate(carried):
            if not isinstance(value, TensorValue) and not hasattr(value, "kind"):
                raise UnsupportedError(
                    f"method {self._name!r}: {node.name!r} carries the literal {value!r} "
                    f"(position {index}); carry a 0-dim tensor instead"
                )
        return While(
            list(initial),
            carried,
            self._sub_block(condition, [*carried, *extra]),
            self._sub_block(body, [*carried, *extra]),
            node,
        )

    def _scan(self, node: fx.Node) -> Operation:
        """Return the ``Scan`` of a scan or map node; a map has no carried values."""
        body, *operands = self._look_up(node.args)
        if node.target is _HIGHER_ORDER.map_impl:
            operands.insert(0, [])
        initial, xs, *optional_extra = operands
        extra = optional_extra[0] if optional_extra else ()
        inner = [item for item in body.graph.nodes if item.op == "placeholder"]
        metas, count = list(node.meta["val"]), len(initial)
        carried = self._fresh(f"{node.name}.carry", metas[:count])
        rows = self._fresh(
            f"{node.name}.row", [item.meta["val"] for item in inner[count : count + len(xs)]]
        )
        block = self._sub_block(body, [*carried, *rows, *extra])
        stacked = self._fresh(node.name, metas[count:])
        for value in stacked:
            if isinstance(value, TensorValue):
                value.grows = True
        return Scan(list(initial), carried, list(xs), rows, block, stacked, node)


def _broadcast_size(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of elements of two shapes broadcast together."""
    rank = max(len(left), len(right))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in (left, right)]
    return prod(b if a == 1 else a for a, b in zip(*padded, strict=True))
