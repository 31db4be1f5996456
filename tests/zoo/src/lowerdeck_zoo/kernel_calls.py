"""A valid call of each kernel that takes more than tensors of one shape, and hostile ones.

A text such as ``"FLOAT 2 3"`` is a tensor (``+`` if its shape may change), a tuple a list of
tensors (``L`` read, ``V`` written, ``O`` optional) or of floats (``F``).
"""

from __future__ import annotations

import random
import struct
from typing import Any

from lowerdeck import serializer as pte

_ARENA = 1 << 18
_TYPES = [kind for kind in pte.ScalarType if kind <= 7 or kind in (9, 11, 15, 27, 28, 29)]
_NUMBERS = (0, 1, 2, 3, -1, -2, 5, 7, 16, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, -(2**63))
_INDICES = (0, 0, 1, 1, 2, -1, -2, 3, 7, 100, -100, 2**31, 2**62, -(2**63))
_FLOATS = (0.0, 1.0, -1.5, 1e300, float("inf"), float("nan"))
_INTEGERS = {
    pte.ScalarType.CHAR: "b",
    pte.ScalarType.SHORT: "h",
    pte.ScalarType.INT: "i",
    pte.ScalarType.LONG: "q",
}

IMAGE = "FLOAT 2 4 6 6"
CALLS: dict[str, list[Any]] = {
    "aten::_conj_physical.out": ["COMPLEX_FLOAT 2 3", "COMPLEX_FLOAT 2 3"],
    "aten::_fft_r2c.out": ["FLOAT 2 4", [1], 0, True, "COMPLEX_FLOAT 2 3"],
    "aten::_fft_c2r.out": ["COMPLEX_FLOAT 2 3", [1], 0, 4, "FLOAT 2 4"],
    "aten::_native_batch_norm_legit.no_stats_out": [
        *(IMAGE, *["FLOAT 4"] * 2, True, 0.1, 1e-05, IMAGE, *["FLOAT 4"] * 2)
    ],
    "aten::_native_batch_norm_legit.out": [
        *(IMAGE, *["FLOAT 4"] * 4, False, 0.1, 1e-05, IMAGE, *["FLOAT 0"] * 2)
    ],
    "aten::_native_batch_norm_legit_no_training.out": [
        *(IMAGE, *["FLOAT 4"] * 4, 0.1, 1e-05, IMAGE, *["FLOAT 0"] * 2)
    ],
    "aten::_pdist_forward.out": ["FLOAT 4 3", 2.0, "FLOAT 6"],
    "aten::_cdist_forward.out": ["FLOAT 4 3", "FLOAT 5 3", 2.0, None, "FLOAT 4 5"],
    "aten::_upsample_bilinear2d_aa.out": [IMAGE, [9, 9], False, *[None] * 2, "FLOAT 2 4 9 9"],
    "aten::any.all_out": ["FLOAT 2 3", "BOOL"],
    "aten::any.dims_out": ["FLOAT 2 3", [1], False, "BOOL 2"],
    "aten::any.out": ["FLOAT 2 3", 1, False, "BOOL 2"],
    "aten::as_strided_copy.out": ["FLOAT 4 4", [2, 2], [4, 1], 1, "FLOAT 2 2"],
    "aten::avg_pool2d.out": [IMAGE, *[[2, 2]] * 2, [0, 0], False, True, None, "FLOAT 2 4 3 3"],
    "aten::_adaptive_avg_pool2d.out": ["FLOAT 2 4 6 6", [3, 2], "FLOAT 2 4 3 2"],
    "aten::convolution.out": [
        *(IMAGE, "FLOAT 4 2 3 3", "FLOAT 4", *[[1, 1]] * 3, False, [0, 0], 2, IMAGE)
    ],
    "aten::convolution_backward.out": [
        *("FLOAT 2 3 6 6", IMAGE, "FLOAT 3 4 3 3", [3], *[[1, 1]] * 3, False, [0, 0], 1),
        *([True, True, True], IMAGE, "FLOAT 3 4 3 3", "FLOAT 3"),
    ],
    "aten::diagonal_copy.out": ["FLOAT 3 4", 0, 0, 1, "FLOAT 3"],
    "aten::embedding.out": ["FLOAT 5 3", "LONG 2 2", -1, False, False, "FLOAT 2 2 3"],
    "aten::expand_copy.out": ["FLOAT 3 1", [2, 3, 4], False, "FLOAT 2 3 4"],
    "aten::glu.out": ["FLOAT 2 4", 1, "FLOAT 2 2"],
    "aten::grid_sampler_2d.out": ["FLOAT 2 4 6 6", "FLOAT 2 3 3 2", 0, 0, False, "FLOAT 2 4 3 3"],
    "aten::index.Tensor_out": ["FLOAT 3 4", ("O", "LONG 2", None), "FLOAT 2 4"],
    "aten::index_put.out": ["FLOAT 3 4", ("O", "LONG 2", None), "FLOAT 2 4", False, "FLOAT 3 4"],
    "aten::index_put_": ["FLOAT 3 4", ("O", "LONG 2"), "FLOAT 2 4", False],
    "aten::index_select.out": ["FLOAT 3 4", 1, "LONG 2", "FLOAT 3 2"],
    "aten::masked_fill.Scalar_out": ["FLOAT 2 3", "BOOL 2 3", 1.0, "FLOAT 2 3"],
    "aten::masked_scatter.out": ["FLOAT 2 3", "BOOL 2 3", "FLOAT 6", "FLOAT 2 3"],
    "aten::masked_select.out": ["FLOAT 2 3", "BOOL 2 3", "+FLOAT 6"],
    "aten::max.dim_max": ["FLOAT 2 3", 1, False, "FLOAT 2", "LONG 2"],
    "aten::min.dim_min": ["FLOAT 2 3", 1, False, "FLOAT 2", "LONG 2"],
    "aten::max_pool2d_with_indices.out": [
        *(IMAGE, *[[2, 2]] * 2, [0, 0], [1, 1], False, "FLOAT 2 4 3 3", "LONG 2 4 3 3")
    ],
    "aten::max_pool2d_with_indices_backward.grad_input": [
        *("FLOAT 2 4 3 3", IMAGE, *[[2, 2]] * 2, [0, 0], [1, 1], False, "LONG 2 4 3 3", IMAGE)
    ],
    "aten::mean.dtype_out": ["FLOAT 2 3", None, "FLOAT"],
    "aten::mean.out": ["FLOAT 2 3", [1], False, None, "FLOAT 2"],
    "aten::sum.IntList_out": ["FLOAT 2 3", [1], True, None, "FLOAT 2 1"],
    "aten::var.correction_out": ["FLOAT 2 3", [1], 1, False, "FLOAT 2"],
    "aten::var.out": ["FLOAT 2 3", [1], True, False, "FLOAT 2"],
    "aten::var_mean.correction_out": ["FLOAT 2 3", [1], 1, False, "FLOAT 2", "FLOAT 2"],
    "aten::amax.out": ["FLOAT 2 3", [1], False, "FLOAT 2"],
    "aten::amin.out": ["FLOAT 2 3", [1], False, "FLOAT 2"],
    "aten::argmax.out": ["FLOAT 2 3", 1, False, "LONG 2"],
    "aten::argmin.out": ["FLOAT 2 3", None, False, "LONG"],
    "aten::narrow_copy.out": ["FLOAT 4 3", 0, 1, 2, "FLOAT 2 3"],
    "aten::native_dropout.out": ["FLOAT 2 3", 0.5, False, "FLOAT 2 3", "BOOL 2 3"],
    "aten::native_group_norm.out": [
        *(IMAGE, *["FLOAT 4"] * 2, 2, 4, 36, 2, 1e-05, IMAGE, *["FLOAT 2 2"] * 2)
    ],
    "aten::native_layer_norm.out": [
        *("FLOAT 2 3 4", [4], *["FLOAT 4"] * 2, 1e-05, "FLOAT 2 3 4", *["FLOAT 2 3 1"] * 2)
    ],
    "aten::nonzero.out": ["FLOAT 2 3", "+LONG 6 2"],
    "aten::permute_copy.out": ["FLOAT 2 3 4", [2, 0, 1], "FLOAT 4 2 3"],
    "aten::pixel_shuffle.out": ["FLOAT 2 4 6 6", 2, "FLOAT 2 1 12 12"],
    "aten::pixel_unshuffle.out": ["FLOAT 2 1 6 6", 2, "FLOAT 2 4 3 3"],
    "aten::prod.int_out": ["FLOAT 2 3", 1, False, None, "FLOAT 2"],
    "aten::prod.out": ["FLOAT 2 3", None, "FLOAT"],
    "aten::reflection_pad1d.out": ["FLOAT 2 4", [1, 1], "FLOAT 2 6"],
    "aten::reflection_pad2d.out": ["FLOAT 2 4 6 6", [1, 1, 1, 1], "FLOAT 2 4 8 8"],
    "aten::reflection_pad3d.out": ["FLOAT 1 2 3 3 3", [1, 1, 1, 1, 1, 1], "FLOAT 1 2 5 5 5"],
    "aten::replication_pad1d.out": ["FLOAT 2 4", [1, 1], "FLOAT 2 6"],
    "aten::replication_pad2d.out": ["FLOAT 2 4 6 6", [1, 1, 1, 1], "FLOAT 2 4 8 8"],
    "aten::replication_pad3d.out": ["FLOAT 1 2 3 3 3", [1, 1, 1, 1, 1, 1], "FLOAT 1 2 5 5 5"],
    "aten::constant_pad_nd.out": ["FLOAT 2 3", [1, 1], 0.5, "FLOAT 2 5"],
    "aten::repeat_interleave.Tensor_out": ["LONG 3", None, "+LONG 9"],
    "aten::repeat.out": ["FLOAT 2 3", [2, 1], "FLOAT 4 3"],
    "aten::roll.out": ["FLOAT 2 3", [1], [1], "FLOAT 2 3"],
    "aten::flip.out": ["FLOAT 2 3", [1], "FLOAT 2 3"],
    "aten::scatter.src_out": ["FLOAT 3 4", 1, "LONG 3 2", "FLOAT 3 2", "FLOAT 3 4"],
    "aten::scatter.value_out": ["FLOAT 3 4", 1, "LONG 3 2", 1.0, "FLOAT 3 4"],
    "aten::scatter_add.out": ["FLOAT 3 4", 1, "LONG 3 2", "FLOAT 3 2", "FLOAT 3 4"],
    "aten::gather.out": ["FLOAT 3 4", 1, "LONG 3 2", False, "FLOAT 3 2"],
    "aten::select_copy.int_out": ["FLOAT 2 3", 1, 1, "FLOAT 2"],
    "aten::select_scatter.out": ["FLOAT 2 3", "FLOAT 2", 1, 0, "FLOAT 2 3"],
    "aten::slice_copy.Tensor_out": ["FLOAT 4 3", 0, 1, 3, 1, "FLOAT 2 3"],
    "aten::slice_scatter.out": ["FLOAT 4 3", "FLOAT 2 3", 0, 1, 3, 1, "FLOAT 4 3"],
    "aten::split_copy.Tensor_out": ["FLOAT 4 3", 2, 0, ("V", "FLOAT 2 3", "FLOAT 2 3")],
    "aten::split_with_sizes_copy.out": ["FLOAT 4 3", [1, 3], 0, ("V", "FLOAT 1 3", "FLOAT 3 3")],
    "aten::unbind_copy.int_out": ["FLOAT 2 3", 0, ("V", "FLOAT 3", "FLOAT 3")],
    "aten::stack.out": [("L", "FLOAT 2 3", "FLOAT 2 3"), 1, "FLOAT 2 2 3"],
    "aten::cat.out": [("L", "FLOAT 2 3", "FLOAT 2 3"), 1, "FLOAT 2 6"],
    "aten::squeeze_copy.dim_out": ["FLOAT 2 1", 1, "FLOAT 2"],
    "aten::squeeze_copy.dims_out": ["FLOAT 2 1", [1], "FLOAT 2"],
    "aten::unsqueeze_copy.out": ["FLOAT 2 3", 1, "FLOAT 2 1 3"],
    "aten::topk.values": ["FLOAT 2 5", 2, 1, True, True, "FLOAT 2 2", "LONG 2 2"],
    "aten::tril.out": ["FLOAT 3 3", 0, "FLOAT 3 3"],
    "aten::t_copy.out": ["FLOAT 2 3", "FLOAT 3 2"],
    "aten::transpose_copy.int_out": ["FLOAT 2 3", 0, 1, "FLOAT 3 2"],
    "aten::unfold_copy.out": ["FLOAT 2 6", 1, 2, 2, "FLOAT 2 3 2"],
    "aten::view_copy.out": ["FLOAT 2 6", [3, -1], "FLOAT 3 4"],
    "aten::view_as_real_copy.out": ["COMPLEX_FLOAT 2 3", "FLOAT 2 3 2"],
    "aten::upsample_bilinear2d.vec_out": ["FLOAT 2 4 6 6", [9, 9], False, None, "FLOAT 2 4 9 9"],
    "aten::upsample_nearest2d.vec_out": [IMAGE, None, ("F", 2.0, 2.0), "FLOAT 2 4 12 12"],
    "aten::mm.out": ["FLOAT 2 3", "FLOAT 3 4", "FLOAT 2 4"],
    "aten::bmm.out": ["FLOAT 2 2 3", "FLOAT 2 3 4", "FLOAT 2 2 4"],
    "aten::addmm.out": ["FLOAT 4", "FLOAT 2 3", "FLOAT 3 4", 1, 1, "FLOAT 2 4"],
    "aten::linear.out": ["FLOAT 2 3", "FLOAT 4 3", "FLOAT 4", "FLOAT 2 4"],
    "aten::_softmax.out": ["FLOAT 2 3", 1, False, "FLOAT 2 3"],
    "aten::_log_softmax.out": ["FLOAT 2 3", 1, False, "FLOAT 2 3"],
    "aten::cumsum.out": ["FLOAT 2 3", 1, None, "FLOAT 2 3"],
    "aten::arange.start_out": [0, 5, 1, "LONG 5"],
    "aten::arange.out": [5, "LONG 5"],
    "aten::full.out": [[2, 3], 1, "FLOAT 2 3"],
    "aten::zeros.out": [[2, 3], "FLOAT 2 3"],
    "aten::ones.out": [[2, 3], "FLOAT 2 3"],
    "aten::rand.out": [[2, 3], "FLOAT 2 3"],
    "aten::randn.out": [[2, 3], "FLOAT 2 3"],
    "aten::empty.out": [[2, 3], None, "FLOAT 2 3"],
    "aten::full_like.out": ["FLOAT 2 3", 1, None, "FLOAT 2 3"],
    "aten::where.self_out": ["BOOL 2 3", "FLOAT 2 3", "FLOAT 2 3", "FLOAT 2 3"],
    "aten::_local_scalar_dense": ["FLOAT 1"],
    "aten::scalar_tensor.out": [1, "FLOAT"],
    "aten::isnan.out": ["FLOAT 2 3", "BOOL 2 3"],
    "aten::_to_copy.out": ["FLOAT 2 3", False, None, "FLOAT 2 3"],
    "aten::gelu.out": ["FLOAT 2 3", "none", "FLOAT 2 3"],
    "aten::div.out_mode": ["LONG 2 3", "LONG 2 3", "floor", "LONG 2 3"],
    "aten::div.Scalar_mode_out": ["LONG 2 3", 2, "trunc", "LONG 2 3"],
    "aten::floor_divide.out": ["LONG 2 3", "LONG 2 3", "LONG 2 3"],
    "aten::remainder.Tensor_out": ["LONG 2 3", "LONG 2 3", "LONG 2 3"],
    "aten::remainder.Scalar_out": ["LONG 2 3", 2, "LONG 2 3"],
    "aten::fmod.Tensor_out": ["LONG 2 3", "LONG 2 3", "LONG 2 3"],
    "aten::fmod.Scalar_out": ["LONG 2 3", 2, "LONG 2 3"],
    "aten::pow.Tensor_Scalar_out": ["LONG 2 3", 2, "LONG 2 3"],
    "aten::div.Scalar_out": ["FLOAT 2 3", 2, "FLOAT 2 3"],
    "aten::elu.out": ["FLOAT 2 3", 1, 1, 1, "FLOAT 2 3"],
}


class _Call:
    """Collects the values of a program of one call."""

    def __init__(self, chance: random.Random, *, apart: bool) -> None:
        self.chance, self.apart = chance, apart
        self.values: list[pte.EValue] = []
        self.constants = [pte.Buffer(b"")]
        self.state = [pte.Buffer(b"")]
        self.memories = [0] if apart else [0, _ARENA]
        self._end = 0

    def add(self, value: Any) -> int:
        self.values.append(pte.EValue(value))
        return len(self.values) - 1

    def tensor(self, text: str, *, written: bool) -> int:
        kind, *sizes = text.removeprefix("+").split()
        moves = pte.TensorShapeDynamism(int(text.startswith("+")))
        return self.shaped(
            pte.ScalarType[kind], [int(size) for size in sizes], moves, written=written
        )

    def shaped(
        self,
        kind: pte.ScalarType,
        sizes: list[int],
        moves: pte.TensorShapeDynamism,
        *,
        written: bool,
    ) -> int:
        tensor = pte.Tensor(kind, 0, sizes, list(range(len(sizes))), shape_dynamism=moves)
        if self.apart:
            if len(sizes) == 4 and self.chance.random() < 0.15:
                tensor.dim_order = [0, 2, 3, 1]
            tensor.allocation_info = pte.AllocationDetails.at(len(self.memories), 0)
            self.memories.append(tensor.nbytes)
            if not written:
                self.state.append(pte.Buffer(self._bytes(kind, tensor.nbytes)))
                tensor.data_buffer_idx = len(self.state) - 1
        elif written:
            tensor.allocation_info = pte.AllocationDetails.at(1, self._end)
            self._end += -(-tensor.nbytes // 16) * 16
        else:
            self.constants.append(pte.Buffer(self._bytes(kind, tensor.nbytes) or b"\0"))
            tensor.data_buffer_idx = len(self.constants) - 1
        return self.add(tensor)

    def _bytes(self, kind: pte.ScalarType, size: int) -> bytes:
        count = size // kind.itemsize
        if kind in _INTEGERS:
            is_wild, most = self.apart and self.chance.random() < 0.4, 1 << 8 * kind.itemsize - 1
            # Not the least one: divided by -1 it ends eager's process, too.
            pool = [n for n in _INDICES if -most < n < most] if is_wild else [0, 1, 1]
            numbers = (self.chance.choice(pool) for _ in range(count))
            return struct.pack(f"<{count}{_INTEGERS[kind]}", *numbers)
        if kind is pte.ScalarType.FLOAT:
            return struct.pack(f"<{count}f", *(self.chance.uniform(-1, 1) for _ in range(count)))
        return bytes(self.chance.choice((0, 1)) for _ in range(size))

    def value(self, given: Any, letter: str) -> int:
        """Return the value of an argument as ``CALLS`` writes it."""
        if isinstance(given, tuple):
            what, *items = given
            if what == "F":
                return self.add(pte.DoubleList(items))
            made = [-1 if x is None else self.tensor(x, written=what == "V") for x in items]
            return self.add((pte.OptionalTensorList if what == "O" else pte.TensorList)(made))
        if isinstance(given, str) and letter not in "sr":
            return self.tensor(given, written=letter == "W")
        if isinstance(given, list):
            if letter == "B":
                return self.add(pte.BoolList(given))
            return self.add(pte.IntList([self.add(pte.Int(number)) for number in given]))
        kinds: dict[type, Any] = {
            type(None): lambda _: pte.Null(),
            bool: pte.Bool,
            int: pte.Int,
            float: pte.Double,
            str: pte.String,
        }
        return self.add(kinds[type(given)](given))

    def spoiled(self, index: int) -> int:
        """Return another value of the kind of ``index``."""
        value, chance = self.values[index].val, self.chance
        if isinstance(value, pte.Tensor):
            return self._other_tensor(value)
        if isinstance(value, pte.Int):
            return self.add(pte.Int(chance.choice(_NUMBERS)))
        if isinstance(value, pte.Double):
            return self.add(pte.Double(chance.choice(_FLOATS)))
        if isinstance(value, pte.IntList | pte.TensorList | pte.OptionalTensorList):
            items = list(value.items)
            at = chance.randrange(len(items) + 1)
            if at == len(items):
                items += items[:1] * chance.choice((1, 5, 20))
            elif chance.random() < 0.3 or items[at] < 0:
                items.pop(at)
            else:
                items[at] = self.spoiled(items[at])
            return self.add(type(value)(items))
        return index

    def _other_tensor(self, tensor: pte.Tensor) -> int:
        chance, kind, sizes = self.chance, tensor.scalar_type, list(tensor.sizes)
        way = chance.randrange(5)
        if way <= 1:
            kind = chance.choice(_TYPES)
        elif way == 2 and sizes:
            sizes[chance.randrange(len(sizes))] = chance.choice((0, 1, 2, 3, 5))
        elif way == 3 and sizes:
            sizes.pop(chance.randrange(len(sizes)))
        else:
            sizes.insert(chance.randrange(len(sizes) + 1), chance.choice((0, 1, 2)))
        written = not tensor.data_buffer_idx
        return self.shaped(kind, sizes, tensor.shape_dynamism, written=written)


_USUAL: dict[str, Any] = {
    **dict.fromkeys("TtW", "FLOAT 2 3"),
    **{letter: (letter, "FLOAT 2 3") for letter in "LVO"},
    **dict(zip("infIbBs", (1, 1, 1.0, [1], False, [False], "none"), strict=True)),
}
"""Arguments of kernels that take tensors of one shape, by the letters of the kernels' table."""


def call_of(name: str, seed: int, *, apart: bool = False) -> pte.Program:
    """Return a program that calls a kernel once: well for seed 0, else with hostile arguments.

    Args:
        name: The kernel.
        seed: Draws what is spoiled.
        apart: Whether each tensor has a memory of its own, so that a byte too many can be told,
            and integers are hostile, too.
    """
    chance = random.Random(f"{name} {seed}")
    call = _Call(chance, apart=apart)
    kernel = pte.runtime_kernels()[name]
    letters, number = kernel.arguments, kernel.returned
    usual = [_USUAL.get(letter) for letter in letters]
    given = zip(CALLS.get(name, usual), letters, strict=True)
    args = [call.value(value, letter) for value, letter in given]
    for _ in range(chance.choice((1, 1, 2, 3)) if seed else 0):
        at = chance.randrange(len(args))
        args[at] = call.spoiled(args[at])
    outputs = [arg for arg, letter in zip(args, letters, strict=True) if letter in "WV"]
    if number:
        args.append(call.add(pte.Int(0)))
    elif name.endswith("_"):
        args.append(args[0])
    else:
        args.append(outputs[0] if len(outputs) == 1 else call.add(pte.TensorList(outputs)))
    operator, _, overload = name.partition(".")
    plan = pte.ExecutionPlan(
        name="forward",
        values=call.values,
        operators=[pte.Operator(operator, overload)],
        chains=[pte.Chain(instructions=[pte.Instruction(pte.KernelCall(0, args))])],
        non_const_buffer_sizes=call.memories,
    )
    program = pte.Program(execution_plan=[plan], constant_buffer=call.constants)
    program.mutable_data = call.state if apart else []
    return program
