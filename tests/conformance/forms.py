"""An operator's samples in every dtype and form of memory, each group in a fork of this process.

A sample's tensors come as inputs, as constants, or computed: turned, channels-last, every second
element, expanded. Torch and the official runtime are imported once; a crash ends its fork only.
"""

from __future__ import annotations

import copy
import importlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowerdeck.emitter import EmitterError, emit
from lowerdeck_zoo import official
from tests.conformance.known import UNORDERED
from tests.conformance.samples import TENSOR, Call, contiguous, samples
from tests.interop.forks import run_in_fork

SECONDS, _WAITS = 120, 10
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "turned": lambda x: contiguous(x.mT).mT if x.dim() > 1 else x,
    "channels_last": lambda x: (
        x.contiguous(memory_format=_LAST[x.dim()]) if x.dim() in _LAST else x
    ),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0] if x.dim() else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() and x.shape[0] else x,
}
PLACES = ("input", "computed", "constant")


class _Placed(nn.Module):
    """Gives ``inner`` its tensors in a form; all but the first may be constants."""

    def __init__(self, inner: nn.Module, form: str, constants: list[torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.form, self.count = inner, FORMS[form], len(constants)
        for number, constant in enumerate(constants):
            self.register_buffer(f"constant{number}", self.form(constant))

    def forward(self, *tensors: torch.Tensor) -> Any:
        held = [getattr(self, f"constant{number}") for number in range(self.count)]
        return self.inner(*map(self.form, tensors), *held)


def verdicts(info: Any, dtype: torch.dtype, seed: int, count: int | None) -> list[tuple[str, str]]:
    """Return what came of some samples, with a description of each.

    Args:
        info: The OpInfo.
        dtype: The dtype of its samples.
        seed: Which samples, and in which forms.
        count: How many samples at most; None takes the first ones as torch has them.
    """
    lib = importlib.import_module(str(official.binding_name()))

    def work() -> Iterator[dict[str, str]]:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        places = count is not None and info.name in UNORDERED
        is_order = places and info.name == "argsort"
        cases = _plain(info, dtype) if count is None else _cases(info, dtype, seed, count)
        for told, module, inputs in cases:
            yield {"told": told}  # what it dies over is known
            verdict = _verdict(module, inputs, dtype, lib, places=places, is_order=is_order)
            yield {"told": told, "verdict": verdict}

    rows, failed = run_in_fork(work, SECONDS, _WAITS)
    found = [(row["verdict"], row["told"]) for row in rows if "verdict" in row]
    if failed:
        found.append((f"fault: {failed}", rows[-1]["told"] if rows else "its samples"))
    return found


Cases = Iterator[tuple[str, nn.Module, tuple[torch.Tensor, ...]]]


def _plain(info: Any, dtype: torch.dtype) -> Cases:
    for index, sample in enumerate(samples(info, dtype)):
        shapes = [tuple(tensor.shape) for tensor in sample.inputs]
        yield f"{index} as it is {shapes}", sample.module, sample.inputs


def _cases(info: Any, dtype: torch.dtype, seed: int, count: int) -> Cases:
    """Yield a description, a module and its inputs."""
    chooser = random.Random(f"{info.name} {info.variant_test_name} {dtype} {seed}")
    torch.manual_seed(seed)
    made = list(info.sample_inputs("cpu", dtype, requires_grad=False))
    for index in sorted(chooser.sample(range(len(made)), min(count, len(made)))):
        sample = made[index]
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(tensor.layout is not torch.strided for tensor in tensors):
            continue
        rest = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        module: nn.Module = Call(info.get_op(), spec, rest)
        inputs = [contiguous(tensor) for tensor in tensors]
        place, form = chooser.choice(PLACES), chooser.choice([*FORMS])
        kept = 1 if place == "constant" and len(inputs) > 1 else len(inputs)
        if place != "input":
            module = _Placed(module, form, inputs[kept:])
        shapes = [tuple(tensor.shape) for tensor in inputs]
        others = [leaf for leaf in rest if leaf is not TENSOR]
        yield f"{index} {place} {form} {shapes} {others}"[:300], module, tuple(inputs[:kept])


def _verdict(
    module: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    lib: Any,
    *,
    places: bool,
    is_order: bool,
) -> str:
    try:
        with torch.no_grad():
            eager = module
            if places and isinstance(module, _Placed):
                # Of a tensor that repeats an element torch takes one that is not in it.
                eager = copy.deepcopy(module)
                eager.form = lambda x, form=module.form: form(x).clone()
            expected = pytree.tree_leaves(eager(*(tensor.clone() for tensor in inputs)))
        program = torch.export.export(module, inputs)
    except Exception:  # noqa: BLE001, RUF100  (whatever torch raises, it is torch's to cure)
        return "not exportable"
    try:
        data = emit(program).to_bytes()
    except EmitterError as error:
        return f"refused: {type(error).__name__}"
    except Exception as error:  # noqa: BLE001, RUF100  (an untyped error is what is sought)
        return f"fault: emit raised {type(error).__name__}: {error}"
    outcome = official.run_here(lib, official.Case(data, [official.Call(inputs)]))
    if not isinstance(outcome, official.Ran):
        return f"fault: {outcome}"
    found = outcome.outputs[0]
    if places and len(expected) > 1:
        # The last result is of places; what lies there is the one before.
        found, expected = found[:-1], expected[:-1]
    elif places and is_order:
        # Places alone: which ones there are must agree.
        found, expected = (
            [one.flatten().sort().values for one in each] for each in (found, expected)
        )
    return difference(found, expected, dtype)


def difference(found: list[Any], expected: list[Any], dtype: torch.dtype) -> str:
    """Return "right", or what differs from eager; narrow floats by the largest number there is.

    Args:
        found: The outputs.
        expected: What eager gives.
        dtype: The type in which it was computed.
    """
    if len(found) != len(expected):
        return f"fault: {len(found)} outputs instead of {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        if not isinstance(other, torch.Tensor):
            if one != other:
                return f"fault: {one!r} instead of {other!r}"
            continue
        atol, rtol = 1e-4, 1e-3
        if dtype in (torch.float16, torch.bfloat16) and other.is_floating_point():
            # Eager and the kernels round sums of many parts at other places.
            finite = other[other.isfinite()].abs()
            atol = 0.03 * max(1.0, float(finite.max()) if finite.numel() else 1.0)
            rtol = 0.05
        try:
            torch.testing.assert_close(one, other, atol=atol, rtol=rtol, equal_nan=True)
        except AssertionError as error:
            return f"fault: {error}"
    return "right"
