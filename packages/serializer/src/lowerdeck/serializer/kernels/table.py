"""The kernels of ExecuTorch 1.4.1: their arguments, layouts, types and limits.

Read from the runtime's wheel: names from its registry, argument kinds from torch's own schemas,
layouts and in-place facts from each kernel's checks and by running them, limits by calling them
with invalid arguments. ``tests/interop`` compares it with the runtime.

A row is the arguments, the words, and the kernels that share them. One letter per argument:

======  =============================  ======  =============================
letter  argument                       letter  argument
======  =============================  ======  =============================
T       Tensor                         t       Tensor or None
W       Tensor that is written         V       list of Tensors, written
L       list of Tensors                O       list of Tensors or None
i       Int                            j       Int or None
I       list of Int                    J       list of Int, or None
n       Int, Double or Bool            m       the same, or None
f       Double                         g       Double or None
b       Bool                           c       Bool or None
B       list of Bool                   F       list of Double, or None
s       String                         r       String or None
======  =============================  ======  =============================

After ``>`` comes the kind of the last argument, the return value, if it is used.

===========================  ======================================================================
word                         the kernel
===========================  ======================================================================
contiguous                   accepts only contiguous tensors
channels_last                accepts channels-last images
channels_last_alike          accepts channels-last images if all tensors have one shape
in_place                     is elementwise: the output may alias an input of the same type, shape
                             and layout
first_in_place               has several outputs, of which the first may alias the first input
into_self                    copies its first argument to the output and writes parts of it: both
                             may alias
complex                      accepts complex tensors
mixed                        accepts real and complex tensors in one call
divides                      divides argument 0 by argument 1: the minimum of 32- and 64-bit
                             integers by -1 aborts the process, and so does a scalar 0
positive(i,...)              divides by its arguments i, which must be 1 or more
promoted(i,...)              promotes tensors i; uint16, uint32 and uint64 do not promote
rank(i,least,most)           requires least to most dimensions of tensor i, by default at most 16
types(i,NAME)                requires a tensor i of the types NAME in limits.py
dimension(i,of)              requires that i is a dimension of tensor ``of``, not negative
wrapped(i,of)                requires that i is a dimension of ``of``, possibly negative
alike(i,j)                   requires tensors i and j of one shape
computed(i)                  trusts the numbers in tensor i, which must not be a constant
elements(i)                  requires a tensor i that is not empty
divisor(i,of)                divides by the number i, which must not be 0 in the type of ``of``
steps(start,end,step)        produces a range of fewer than 2**31 numbers; -1 is a default
indices(i,of)                requires indices i for at most the dimensions of ``of``
shape(i)                     requires sizes i without both -1 and 0
===========================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from lowerdeck.serializer.kernels.limits import Limit, parse_limit

RUNTIME_VERSION = "1.4.1"
"""The runtime release that the table describes."""

PRIMITIVES = "executorch_prim"
"""Namespace of scalar and view operators, which are built into the runtime."""

_ROWS = {
    "aten": """
IW>: ones.out rand.out randn.out zeros.out
IjW>: empty.out
InW>: full.out
LiW> complex wrapped(1,2): cat.out
LiW> contiguous: stack.out
T>n: _local_scalar_dense sym_numel
TIIIIbWW> channels_last positive(1,2,4): max_pool2d_with_indices.out
TIIIbbjW> contiguous positive(1,2): avg_pool2d.out
TIIW>: roll.out
TIIjW> contiguous: as_strided_copy.out
TIW> contiguous positive(1): _adaptive_avg_pool2d.out
TIW>: flip.out replication_pad1d.out replication_pad2d.out replication_pad3d.out
TIW> contiguous complex: permute_copy.out repeat.out
TIW> contiguous: reflection_pad1d.out reflection_pad2d.out reflection_pad3d.out
TIW> contiguous: squeeze_copy.dims_out
TIW> contiguous complex shape(1): view_copy.out
TIbW> elements(0): amax.out amin.out
TIbW> contiguous complex: expand_copy.out
TIbggW>: _upsample_bilinear2d_aa.out
TIiV>: split_with_sizes_copy.out
TIibW> complex mixed types(0,floating): _fft_r2c.out
TIiiW> complex mixed types(4,floating) dimension(1,0): _fft_c2r.out
TInW>: constant_pad_nd.out
TIttfWWW> contiguous: native_layer_norm.out
TJFW> channels_last: upsample_nearest2d.vec_out
TJbFW> channels_last: upsample_bilinear2d.vec_out
TJbW>: any.dims_out
TJbbW> contiguous: var.out
TJbjW> contiguous: mean.out
TJbjW> contiguous complex: sum.IntList_out
TJmbW> contiguous: var.correction_out
TJmbWW>: var_mean.correction_out
TOTbW> contiguous into_self indices(1,0): index_put.out
TOW> contiguous complex indices(1,0): index.Tensor_out
TTIIIIbTW> positive(2,3,5) alike(7,0) computed(7): max_pool2d_with_indices_backward.grad_input
TTTJIIIbIiBWWW> positive(4,6,9): convolution_backward.out
TTTW> into_self: masked_scatter.out
TTTW> channels_last_alike in_place promoted(1,2): where.self_out
TTTnnW> contiguous: addmm.out
TTW>: atan2.out fill.Tensor_out logical_and.out logical_or.out logical_xor.out masked_select.out
TTW> promoted(0,1): bitwise_and.Tensor_out bitwise_left_shift.Tensor_out bitwise_or.Tensor_out
TTW> promoted(0,1): bitwise_right_shift.Tensor_out bitwise_xor.Tensor_out fmod.Tensor_out
TTW> contiguous complex rank(0,3,3) rank(1,3,3): bmm.out
TTW> channels_last_alike in_place complex promoted(0,1) types(2,floating): div.out
TTW> channels_last_alike promoted(0,1): eq.Tensor_out ge.Tensor_out gt.Tensor_out le.Tensor_out
TTW> channels_last_alike promoted(0,1): lt.Tensor_out ne.Tensor_out
TTW> divides promoted(0,1): floor_divide.out remainder.Tensor_out
TTW> channels_last_alike in_place promoted(0,1): maximum.out minimum.out pow.Tensor_Tensor_out
TTW> contiguous: mm.out
TTW> channels_last_alike in_place complex promoted(0,1): mul.out
TTbW>: copy.out
TTfjW> contiguous: _cdist_forward.out
TTibbW> contiguous types(1,indices): embedding.out
TTiiW> into_self: select_scatter.out
TTiibW> contiguous: grid_sampler_2d.out
TTijjiW> into_self: slice_scatter.out
TTnW> channels_last_alike in_place complex promoted(0,1): add.out sub.out
TTnW>: masked_fill.Scalar_out
TTrW> divides channels_last_alike in_place complex promoted(0,1): div.out_mode
TTtIIIbIiW> channels_last positive(3,5,8) types(2,numbers): convolution.out
TTtW> contiguous: linear.out
TW>: _conj_physical.out acos.out acosh.out alias_copy.out any.all_out asin.out asinh.out atan.out
TW>: atanh.out bitwise_not.out ceil.out cosh.out detach_copy.out expm1.out floor.out isinf.out
TW>: isnan.out lift_fresh_copy.out log10.out log1p.out log2.out nonzero.out round.out sign.out
TW>: sinh.out tan.out trunc.out
TW> channels_last_alike in_place complex mixed: abs.out
TW> channels_last_alike in_place: cos.out erf.out exp.out log.out logical_not.out neg.out relu.out
TW> channels_last_alike in_place: rsqrt.out sigmoid.out sin.out sqrt.out tanh.out
TW> contiguous: max.unary_out min.unary_out t_copy.out
TW> channels_last_alike: reciprocal.out
TW> complex mixed: view_as_real_copy.out
TbjW>: _to_copy.out
TfW> contiguous: _pdist_forward.out
TfcWW>: native_dropout.out
TgW>: logit.out
Ti>n dimension(1,0): sym_size.int
TiTTW> into_self: scatter.src_out
TiTTW> contiguous into_self: scatter_add.out
TiTW> contiguous complex mixed: index_select.out
TiTbW>: gather.out
TiTnW> into_self: scatter.value_out
TiV> contiguous: unbind_copy.int_out
TiW>: glu.out
TiW> contiguous positive(1): pixel_shuffle.out
TiW> positive(1): pixel_unshuffle.out
TiW> contiguous: squeeze_copy.dim_out tril.out unsqueeze_copy.out
TibW>: _log_softmax.out _softmax.out any.out
TibWW> contiguous: max.dim_max min.dim_min
TibjW>: prod.int_out
TiiV> positive(1): split_copy.Tensor_out
TiiW> contiguous complex: select_copy.int_out
TiiW> contiguous: transpose_copy.int_out
TiibbWW>: topk.values
TiiiW> contiguous: diagonal_copy.out
TiiiW> dimension(1,0): narrow_copy.out
TiiiW> positive(3) wrapped(1,0): unfold_copy.out
TijW> types(0,standard): cumsum.out
TijjiW> complex: slice_copy.Tensor_out
TjW> complex: clone.out
TjW> contiguous: mean.dtype_out repeat_interleave.Tensor_out
TjW>: prod.out
TjbW> elements(0): argmax.out argmin.out
TmmW> channels_last_alike in_place: clamp.out
TnW>: bitwise_and.Scalar_out bitwise_left_shift.Tensor_Scalar_out bitwise_or.Scalar_out
TnW>: bitwise_right_shift.Tensor_Scalar_out bitwise_xor.Scalar_out fill.Scalar_out fmod.Scalar_out
TnW> channels_last_alike in_place complex: div.Scalar_out mul.Scalar_out
TnW> channels_last_alike: eq.Scalar_out ge.Scalar_out gt.Scalar_out le.Scalar_out lt.Scalar_out
TnW> channels_last_alike: ne.Scalar_out
TnW> channels_last_alike in_place: leaky_relu.out pow.Tensor_Scalar_out
TnW> divides divisor(1,0): remainder.Scalar_out
TnjW> contiguous: full_like.out
TnnW> channels_last_alike in_place complex: add.Scalar_out sub.Scalar_out
TnnW> channels_last_alike in_place: hardtanh.out
TnnW>: rsub.Scalar_out
TnnnW> channels_last_alike in_place: elu.out
TnrW> divides channels_last_alike in_place complex divisor(1,0): div.Scalar_mode_out
TsW> channels_last_alike in_place: gelu.out
TttTTffWWW> contiguous in_place first_in_place: _native_batch_norm_legit_no_training.out
TttW> channels_last_alike in_place promoted(0,1,2): clamp.Tensor_out
TttWWbffWWW> contiguous: _native_batch_norm_legit.out
TttbffWWW> contiguous: _native_batch_norm_legit.no_stats_out
TttiiiifWWW> contiguous positive(3,4,5,6) rank(0,2) rank(1,1) rank(2,1): native_group_norm.out
WOTb> indices(1,0) rank(2,1): index_put_
WTb>: copy_
nTW> channels_last_alike in_place: pow.Scalar_out
nW> contiguous steps(-1,0,-1): arange.out
nW>: scalar_tensor.out
nnnW> contiguous steps(0,1,2): arange.start_out
""",
    "dim_order_ops": """
IJW>: _empty_dim_order.out
TbJW>: _clone_dim_order.out _to_dim_order_copy.out
""",
    "et_copy": """
TW>: _d2h_copy.out _h2d_copy.out
""",
    PRIMITIVES: """
TIT> complex: et_view.default
WTi>: et_copy_index.tensor
n>n: ceil.Scalar neg.Scalar round.Scalar sym_float.Scalar sym_int.Scalar sym_not.Scalar
n>n: trunc.Scalar
nn>n: add.Scalar eq.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar mul.Scalar sub.Scalar
nn>n: sym_max.Scalar sym_min.Scalar truediv.Scalar
nn>n divides: floordiv.Scalar floordiv.int mod.Scalar mod.int
nnn>n: sym_ite.Scalar
""",
}


@dataclass(frozen=True, slots=True)
class RuntimeKernel:
    """One kernel of the official runtime.

    Attributes:
        name: Full name, such as ``"aten::add.out"``; an operator without overload has no dot.
        arguments: The letter of each argument, without the return value.
        returned: The letter of the return value; empty if it is never used.
        words: Properties of layouts, types and memory, such as ``"contiguous"``.
        limits: Limits on arguments beyond their kinds.
    """

    name: str
    arguments: str
    returned: str
    words: frozenset[str]
    limits: tuple[Limit, ...]

    @property
    def operator(self) -> str:
        """Return the name without namespace and overload, such as ``"add"``."""
        return self.name.partition("::")[2].partition(".")[0]


def _parse(space: str, row: str) -> Iterator[RuntimeKernel]:
    described, _, names = row.partition(": ")
    letters, *words = described.split()
    arguments, _, returned = letters.partition(">")
    limits = [limit for word in words if (limit := parse_limit(word)) is not None]
    plain = frozenset(word for word in words if "(" not in word)
    for name in names.split():
        yield RuntimeKernel(f"{space}::{name}", arguments, returned, plain, tuple(limits))


@cache
def runtime_kernels() -> Mapping[str, RuntimeKernel]:
    """Return all kernels of ExecuTorch 1.4.1 by their full names."""
    return {
        kernel.name: kernel
        for space, rows in _ROWS.items()
        for row in rows.strip().splitlines()
        for kernel in _parse(space, row)
    }


@cache
def kernel_names() -> frozenset[str]:
    """Return the full names of the kernels of ExecuTorch 1.4.1 that compute on tensors.

    Returns:
        Names such as ``aten::add.out``; an operator without an overload has no dot. The
        built-in scalar and view operators (``executorch_prim``) are omitted.
    """
    return frozenset(name for name in runtime_kernels() if not name.startswith(PRIMITIVES))
