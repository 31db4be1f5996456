"""Linearize the blocks of a method to one list of steps, with control flow as jumps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from lowerdeck.emitter.backend.boxing import box, box_untyped
from lowerdeck.emitter.ir import runtime_ops
from lowerdeck.emitter.ir.graph import (
    Block,
    Call,
    Cond,
    Delegate,
    Kernel,
    Method,
    Scan,
    While,
    values_in,
)
from lowerdeck.emitter.ir.instructions import (
    Code,
    DelegateStep,
    JumpStep,
    KernelStep,
    Label,
    ListArg,
    MoveStep,
    Step,
)
from lowerdeck.emitter.ir.kernel_lookup import out_variant
from lowerdeck.emitter.ir.values import Role, ScalarValue, Storage, TensorValue, root_of
from lowerdeck.serializer import TensorList
from lowerdeck.torch_base import OpOverload, schema_of

_SELECT = Kernel("aten::select_copy", "int_out")


def linearize(method: Method, *, plan_outputs: bool = True) -> Code:
    """Return the steps of a method with selected kernels; assign storages to its values.

    Args:
        method: The method; its blocks are not changed.
        plan_outputs: Whether outputs get planned memory; otherwise the caller provides it.
    """
    return _Linearizer(method, plan_outputs).run()


class _Linearizer:
    def __init__(self, method: Method, plan_outputs: bool) -> None:
        self._method = method
        self._plan_outputs = plan_outputs
        self._steps: list[Step] = []
        self._loops: list[range] = []
        self._branches: list[range] = []
        self._storages: list[Storage] = []
        self._sharers: dict[Storage, int] = {}
        self._states: list[TensorValue] = []

    def run(self) -> Code:
        method = self._method
        for value in values_in(method.inputs):
            if isinstance(value, TensorValue):
                self._storage(value)
        self._block(method.block)
        outputs = self._write_back()
        if not self._plan_outputs:
            outputs = self._for_caller(outputs)
        for value in values_in(outputs):
            if isinstance(value, TensorValue):
                self._storage(value)
        return Code(
            name=method.name,
            steps=self._steps,
            loops=self._loops,
            inputs=method.inputs,
            outputs=outputs,
            storages=self._storages,
            states=self._states,
            branches=self._branches,
        )

    # Storages

    def _storage(self, value: TensorValue) -> Storage:
        """Return the storage of ``value``, created at first use."""
        if value.storage is None:
            self._make_storage(value)
        assert value.storage is not None
        return value.storage

    def _make_storage(self, value: TensorValue) -> None:
        if value.base is None:
            role = value.fixed_role or Role.ACTIVATION
            value.storage = Storage(value.nbytes, role, value.key or value.name)
            self._storages.append(value.storage)
            self._sharers[value.storage] = 1
            if value.state:
                self._states.append(value)
            return
        value.storage = self._storage(value.base)
        self._sharers[value.storage] += 1
        # The size bound of a reshaped tensor may be looser than that of its base.
        root, offset = root_of(value)
        if root.constant is None:
            value.storage.nbytes = max(value.storage.nbytes, offset + value.nbytes)

    def _add(self, step: Step) -> None:
        for value in (*step.reads, *step.writes):
            self._storage(value)
        self._steps.append(step)

    # Operations

    def _block(self, block: Block) -> None:
        for operation in block.body:
            match operation:
                case Call():
                    self._call(operation)
                case Delegate():
                    self._delegate(operation)
                case Cond():
                    self._cond(operation)
                case While():
                    self._while(operation)
                case Scan():
                    self._scan(operation)

    def _call(self, call: Call) -> None:
        if call.kernel is None:
            # The result is a view that shares its base's memory.
            return
        args, outs = call.args, call.outs
        rewritten: list[Any] = outs[len(outs) - len(call.rewritten) :]
        for place, value in zip(call.rewritten, rewritten, strict=True):
            # Copy first; write_in_place removes the copy if the old content is not read later.
            self._copy(value, args[place], call.origin)
            args = [*args[:place], value, *args[place + 1 :]]
        own = outs[: len(outs) - len(rewritten)]
        self._kernel(call.kernel, _boxed(call.target, args), own, call.origin, rewritten)

    def _kernel(
        self,
        kernel: Kernel,
        args: list[Any],
        outs: Sequence[Any],
        origin: fx.Node | None,
        rewritten: Sequence[TensorValue] = (),
    ) -> None:
        reads = _tensors(args)
        tensors = tuple(value for value in outs if isinstance(value, TensorValue))
        if kernel.list_out:
            boxed = [*args, *[ListArg(TensorList, tensors)] * 2]
        elif len(outs) == 1:
            boxed = [*args, outs[0], outs[0]]
            if kernel.name.startswith("executorch_prim::") or kernel in _ONE_SLOT:
                boxed.pop()
        elif outs:
            boxed = [*args, *outs, ListArg(TensorList, tensors)]
        else:
            boxed = [*args, None]
        self._add(KernelStep(kernel, boxed, reads, (*tensors, *rewritten), origin))

    def _delegate(self, call: Delegate) -> None:
        tensors = tuple(value for value in call.outs if isinstance(value, TensorValue))
        args = [box_untyped(argument) for argument in call.args]
        self._add(
            DelegateStep(call.module, [*args, *call.outs], _tensors(args), tensors, call.origin)
        )

    # Control flow

    def _jump(self, condition: Any, target: Label, origin: fx.Node | None) -> None:
        reads = (condition,) if isinstance(condition, TensorValue) else ()
        self._add(JumpStep(condition, target, origin, reads))

    def _bind(self, label: Label) -> None:
        label.index = len(self._steps)

    def _cond(self, cond: Cond) -> None:
        on_false, end, first = Label(), Label(), len(self._steps)
        self._jump(cond.predicate, on_false, cond.origin)
        self._block(cond.branches[0])
        self._assign(cond.outs, cond.branches[0].results, cond.origin)
        self._jump(False, end, cond.origin)
        self._bind(on_false)
        self._block(cond.branches[1])
        self._assign(cond.outs, cond.branches[1].results, cond.origin)
        self._bind(end)
        self._branches.append(range(first, len(self._steps)))

    def _while(self, loop: While) -> None:
        self._assign(loop.carried, loop.initial, loop.origin)
        head, end = Label(), Label()
        self._bind(head)
        self._block(loop.condition)
        self._jump(loop.condition.results[0], end, loop.origin)
        self._block(loop.body)
        self._assign(loop.carried, loop.body.results, loop.origin)
        self._jump(False, head, loop.origin)
        self._bind(end)
        self._loops.append(range(head.index, end.index))

    def _scan(self, scan: Scan) -> None:
        self._assign(scan.carried, scan.initial, scan.origin)
        name = scan.origin.name if scan.origin is not None else "scan"
        turn, done = ScalarValue(f"{name}.turn", int), ScalarValue(f"{name}.done", bool)
        length: Any = scan.xs[0].shape[0]
        if not isinstance(length, int):
            length = ScalarValue(f"{name}.length", int)
            self._kernel(runtime_ops.SYM_SIZE, [scan.xs[0], 0], [length], scan.origin)
        self._add(MoveStep(0, turn, scan.origin))
        head = Label()
        self._bind(head)
        for source, row in zip(scan.xs, scan.rows, strict=True):
            self._kernel(_SELECT, [source, 0, turn], [row], scan.origin)
        self._block(scan.body)
        carried = len(scan.carried)
        for target, row in zip(scan.stacked, scan.body.results[carried:], strict=True):
            step = KernelStep(
                runtime_ops.COPY_ROW, [target, row, turn], (row,), (target,), scan.origin
            )
            self._add(step)
        self._assign(scan.carried, scan.body.results[:carried], scan.origin)
        self._kernel(runtime_ops.ADD, [turn, 1], [turn], scan.origin)
        self._kernel(runtime_ops.EQUAL, [turn, length], [done], scan.origin)
        self._jump(done, head, scan.origin)
        self._loops.append(range(head.index, len(self._steps)))

    # Assignments

    def _assign(self, targets: Sequence[Any], sources: Sequence[Any], origin: Any) -> None:
        """Assign ``sources`` to ``targets`` in parallel: each source is read before any write."""
        pairs = [
            (target, source)
            for target, source in zip(targets, sources, strict=True)
            if target is not source and target is not None
        ]
        written = {self._storage(target) for target, _ in pairs if isinstance(target, TensorValue)}
        moved = {target for target, _ in pairs if isinstance(target, ScalarValue)}
        ready: list[tuple[Any, Any]] = []
        for target, source in pairs:
            kept = source
            if isinstance(source, TensorValue) and self._storage(source) in written:
                kept = source.like(f"{source.name}.old")
                self._copy(kept, source, origin)
            elif isinstance(source, ScalarValue) and source in moved:
                kept = ScalarValue(f"{source.name}.old", source.kind, source.initial)
                self._add(MoveStep(source, kept, origin))
            ready.append((target, kept))
        for target, source in ready:
            if isinstance(target, TensorValue):
                self._copy(target, source, origin)
            else:
                self._add(MoveStep(source, target, origin))

    def _copy(self, target: TensorValue, source: TensorValue, origin: fx.Node | None) -> None:
        if target.dim_order == source.dim_order and target.contiguous:
            self._kernel(runtime_ops.COPY, [source, None], [target], origin)
        else:
            order = box_untyped(list(target.dim_order))
            kernel = runtime_ops.CLONE_DIM_ORDER
            self._kernel(kernel, [source, False, order], [target], origin)

    def _write_back(self) -> list[Any]:
        """Assign mutated buffers and inputs; return the outputs, copied if overwritten."""
        pairs = [(w.target, w.source) for w in self._method.write_backs]
        pairs = [(target, source) for target, source in pairs if target is not source]
        written = {self._storage(target) for target, _ in pairs}
        outputs: list[Any] = []
        kept: dict[TensorValue, TensorValue] = {}
        for value in self._method.outputs:
            if isinstance(value, TensorValue) and self._storage(value) in written:
                # The output is the buffer's old content: copy it before the write.
                if value not in kept:
                    kept[value] = value.like(f"{value.name}.old")
                    self._copy(kept[value], value, None)
                outputs.append(kept[value])
            else:
                outputs.append(value)
        self._assign([t for t, _ in pairs], [s for _, s in pairs], None)
        return outputs

    def _for_caller(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs in memory that the caller provides, copying them if necessary."""
        copies: dict[TensorValue, TensorValue] = {}
        for value in outputs:
            if not isinstance(value, TensorValue) or value in copies:
                continue
            if value.constant is not None and not value.state:
                continue
            storage = self._storage(value)
            if storage.role is Role.CALLER:
                continue
            if storage.role is Role.ACTIVATION and self._sharers[storage] == 1:
                # No other value shares its storage, so its kernel can write to the caller's
                # memory.
                storage.role = Role.CALLER
                continue
            target = value.like(f"{value.name}.output")
            target.fixed_role = Role.CALLER
            self._copy(target, value, None)
            copies[value] = target
        return [copies.get(value, value) for value in outputs]


_ONE_SLOT = frozenset(
    {runtime_ops.SYM_SIZE, Kernel("aten::sym_numel", ""), Kernel("aten::_local_scalar_dense", "")}
)


def _boxed(target: Any, args: Sequence[Any]) -> list[Any]:
    if not isinstance(target, OpOverload):
        return [box_untyped(argument) for argument in args]
    arguments = schema_of(target).arguments
    variant = out_variant(target)
    kept = variant.kept if variant is not None else tuple(range(len(arguments)))
    return [box(args[i], str(arguments[i].type)) for i in kept]


def _tensors(args: Sequence[Any]) -> tuple[TensorValue, ...]:
    tensors: list[TensorValue] = []
    for argument in args:
        items = getattr(argument, "items", None)
        for item in items if isinstance(items, tuple) else (argument,):
            if isinstance(item, TensorValue):
                tensors.append(item)
    return tuple(tensors)
