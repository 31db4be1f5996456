"""The page data of a method: instructions, operators, delegates, planned memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lowerdeck.inspect.report.aliases import list_members, result_count
from lowerdeck.inspect.report.delegates import DelegateEntries
from lowerdeck.inspect.report.embed import Interned, clip, number
from lowerdeck.inspect.report.lifetimes import columns_of, live_ranges, steps
from lowerdeck.inspect.report.trace import Watched, watched_entry
from lowerdeck.inspect.report.values import values_table
from lowerdeck.serializer import (
    DelegateCall,
    ExecutionPlan,
    Frame,
    KernelCall,
    OptionalTensorList,
    Tensor,
    TensorList,
)


def method_entry(
    plan: ExecutionPlan,
    delegates: DelegateEntries,
    texts: Interned[str],
    frames: Interned[Frame],
    watched: Watched,
) -> dict[str, Any]:
    """Return the page data of one method.

    Args:
        texts: Table of strings of the page.
        frames: Table of stack frames of the page.
        watched: Times of calls from a trace.
    """
    return {
        "name": clip(plan.name),
        "inputs": plan.inputs,
        "outputs": plan.outputs,
        "values": values_table(plan, texts),
        "instructions": _instructions(plan, frames),
        "operators": _operators(plan),
        "delegates": _delegates(plan, delegates),
        "arenas": _arenas(plan),
        "watched": watched_entry(plan, watched),
    }


def _instructions(plan: ExecutionPlan, frames: Interned[Frame]) -> dict[str, Any]:
    """Return columns: kind (a letter), target, args, outs, stack (an index into stacks or -1).

    ``outs`` is the number of results at the end of the arguments, including the return value.
    """
    kinds, targets, args, outs = [], [], [], []
    for step in steps(plan):
        kind, target, values = columns_of(step)
        kinds.append(kind)
        targets.append(target)
        args.append(values)
        outs.append(result_count(plan, values) if kind == "k" else 0)
    stacks = Interned[tuple[int, ...]]()
    stack: list[int] = []
    starts: list[int] = []
    for chain in plan.chains:
        starts.append(len(stack))
        traces = chain.stacktrace or []
        for number_in_chain in range(len(chain.instructions)):
            items = traces[number_in_chain].items if number_in_chain < len(traces) else []
            numbers = tuple(frames.number_of(frame) for frame in items[-64:])
            stack.append(stacks.number_of(numbers) if numbers else -1)
    return {
        "kind": "".join(kinds),
        "target": targets,
        "args": args,
        "outs": outs,
        "stack": stack,
        "stacks": stacks.items,
        "chains": starts,
    }


def _operators(plan: ExecutionPlan) -> list[dict[str, Any]]:
    """Return the name, number of calls, bytes written and bytes read of each operator."""
    written, read = _bytes_by_operator(plan)
    calls = Counter(step.op_index for step in steps(plan) if isinstance(step, KernelCall))
    return [
        {
            "name": clip(operator.full_name),
            "calls": calls[index],
            "written": number(written[index]),
            "read": number(read[index]),
        }
        for index, operator in enumerate(plan.operators)
    ]


def _bytes_by_operator(plan: ExecutionPlan) -> tuple[Counter[int], Counter[int]]:
    sizes = _value_bytes(plan)
    written, read = Counter[int](), Counter[int]()
    for step in steps(plan):
        if not isinstance(step, KernelCall) or not step.args:
            continue
        outs = result_count(plan, step.args)
        written[step.op_index] += _at(sizes, step.args[-1])
        read[step.op_index] += sum(_at(sizes, arg) for arg in step.args[: len(step.args) - outs])
    return written, read


def _value_bytes(plan: ExecutionPlan) -> list[int]:
    single = [e.val.nbytes if isinstance(e.val, Tensor) else 0 for e in plan.values]
    return [
        sum(_at(single, member) for member in list_members(plan, index))
        if isinstance(evalue.val, TensorList | OptionalTensorList)
        else single[index]
        for index, evalue in enumerate(plan.values)
    ]


def _at(sizes: Sequence[int], index: int) -> int:
    return sizes[index] if 0 <= index < len(sizes) else 0


def _delegates(plan: ExecutionPlan, entries: DelegateEntries) -> list[dict[str, Any]]:
    calls = Counter(s.delegate_index for s in steps(plan) if isinstance(s, DelegateCall))
    return [entries.entry(delegate, calls[index]) for index, delegate in enumerate(plan.delegates)]


def _arenas(plan: ExecutionPlan) -> list[dict[str, Any]]:
    """Return each planned memory with the live ranges of its tensors.

    A live range is a list of value, offset, bytes, first instruction, last instruction and
    sources.
    """
    blocks: dict[int, list[list[Any]]] = {}
    for live in live_ranges(plan):
        block = [live.value, number(live.offset), number(live.nbytes), live.start, live.end]
        blocks.setdefault(live.memory_id, []).append(
            [*block, *([live.sources] * bool(live.sources))]
        )
    devices = {
        device.buffer_idx: f"{device.device_type.name} {device.device_index}"
        for device in plan.non_const_buffer_device or []
    }
    return [
        {
            "id": index,
            "size": number(size),
            "device": devices.get(index, "CPU"),
            "blocks": blocks.get(index, []),
        }
        for index, size in enumerate(plan.non_const_buffer_sizes)
        if index > 0
    ]
