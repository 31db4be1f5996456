"""The kernels of ExecuTorch 1.4.1: of each its arguments, layouts, types and limits, in one row.

Read from the runtime's wheel: names from its registry, argument kinds from torch's own schemas,
layouts and in-place facts from the checks at the head of each kernel and by running them, limits
by calling them with hostile arguments. ``tests/interop`` compares all of it with the runtime. A
new runtime version changes this file and no other.

A row is a name, its arguments, and words. One letter an argument:

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

After ``>`` comes what the last argument, the one for the return value, must be if it is used.

===========================  ======================================================================
word                         the kernel
===========================  ======================================================================
contiguous                   refuses any layout but the contiguous one
channels_last                takes images whose channels are innermost in memory
channels_last_alike          takes them if all its tensors have one shape: else it broadcasts wrong
in_place                     computes element i from elements i, so that its output may be the very
                             memory of an input of the same type, shape and layout
first_in_place               has more outputs, of which the first may be its first input's memory
into_self                    copies its first argument to the output and writes parts of it, so
                             that both may be one memory
complex                      takes complex tensors
mixed                        takes real and complex tensors in one call
divides                      divides argument 0 by argument 1: with integers of 32 and 64 bits the
                             smallest one by -1 ends the process, and with numbers that are no
                             tensors a 0 does as well
positive(i,...)              divides by its arguments i, which must be 1 or more
promoted(i,...)              promotes tensors i, of which none may be a bare unsigned one
rank(i,least,most)           takes a tensor i of so many dimensions, at most 16 if not said
types(i,NAME)                takes a tensor i of the types NAME in limits.py
dimension(i,of)              takes in i a dimension of tensor ``of``, counted from the front
wrapped(i,of)                the same, also counted from the end
alike(i,j)                   takes tensors i and j of one shape
computed(i)                  trusts the numbers in tensor i, which must not be a constant
elements(i)                  takes a tensor i that is not empty
divisor(i,of)                divides by the number i, which must not be 0 in the type of ``of``
steps(start,end,step)        makes as many numbers as that, fewer than 2**31; -1 is a default
indices(i,of)                takes in i indices for at most the dimensions of ``of``
shape(i)                     takes sizes i, not both a -1 and a 0
===========================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from lowerdeck.serializer.kernels.limits import Limit, parse_limit

RUNTIME_VERSION = "1.4.1"
"""The runtime that the table describes."""

PRIMITIVES = "executorch_prim"
"""The name space of operators on numbers and views, which are part of the runtime itself."""

_ROWS = {
    "aten": """
_adaptive_avg_pool2d.out TIW> contiguous positive(1)
_cdist_forward.out TTfjW> contiguous
_conj_physical.out TW>
_fft_c2r.out TIiiW> complex mixed types(4,floating) dimension(1,0)
_fft_r2c.out TIibW> complex mixed types(0,floating)
_local_scalar_dense T>n
_log_softmax.out TibW>
_native_batch_norm_legit.no_stats_out TttbffWWW> contiguous
_native_batch_norm_legit.out TttWWbffWWW> contiguous
_native_batch_norm_legit_no_training.out TttTTffWWW> contiguous in_place first_in_place
_pdist_forward.out TfW> contiguous
_softmax.out TibW>
_to_copy.out TbjW>
_upsample_bilinear2d_aa.out TIbggW>
abs.out TW> channels_last_alike in_place complex mixed
acos.out TW>
acosh.out TW>
add.Scalar_out TnnW> channels_last_alike in_place complex
add.out TTnW> channels_last_alike in_place complex promoted(0,1)
addmm.out TTTnnW> contiguous
alias_copy.out TW>
amax.out TIbW> elements(0)
amin.out TIbW> elements(0)
any.all_out TW>
any.dims_out TJbW>
any.out TibW>
arange.out nW> contiguous steps(-1,0,-1)
arange.start_out nnnW> contiguous steps(0,1,2)
argmax.out TjbW> elements(0)
argmin.out TjbW> elements(0)
as_strided_copy.out TIIjW> contiguous
asin.out TW>
asinh.out TW>
atan.out TW>
atan2.out TTW>
atanh.out TW>
avg_pool2d.out TIIIbbjW> contiguous positive(1,2)
bitwise_and.Scalar_out TnW>
bitwise_and.Tensor_out TTW> promoted(0,1)
bitwise_left_shift.Tensor_Scalar_out TnW>
bitwise_left_shift.Tensor_out TTW> promoted(0,1)
bitwise_not.out TW>
bitwise_or.Scalar_out TnW>
bitwise_or.Tensor_out TTW> promoted(0,1)
bitwise_right_shift.Tensor_Scalar_out TnW>
bitwise_right_shift.Tensor_out TTW> promoted(0,1)
bitwise_xor.Scalar_out TnW>
bitwise_xor.Tensor_out TTW> promoted(0,1)
bmm.out TTW> contiguous complex rank(0,3,3) rank(1,3,3)
cat.out LiW> complex wrapped(1,2)
ceil.out TW>
clamp.Tensor_out TttW> channels_last_alike in_place promoted(0,1,2)
clamp.out TmmW> channels_last_alike in_place
clone.out TjW> complex
constant_pad_nd.out TInW>
convolution.out TTtIIIbIiW> channels_last positive(3,5,8) types(2,numbers)
convolution_backward.out TTTJIIIbIiBWWW> positive(4,6,9)
copy.out TTbW>
copy_ WTb>
cos.out TW> channels_last_alike in_place
cosh.out TW>
cumsum.out TijW> types(0,standard)
detach_copy.out TW>
diagonal_copy.out TiiiW> contiguous
div.Scalar_mode_out TnrW> divides channels_last_alike in_place complex divisor(1,0)
div.Scalar_out TnW> channels_last_alike in_place complex
div.out TTW> channels_last_alike in_place complex promoted(0,1) types(2,floating)
div.out_mode TTrW> divides channels_last_alike in_place complex promoted(0,1)
elu.out TnnnW> channels_last_alike in_place
embedding.out TTibbW> contiguous types(1,indices)
empty.out IjW>
eq.Scalar_out TnW> channels_last_alike
eq.Tensor_out TTW> channels_last_alike promoted(0,1)
erf.out TW> channels_last_alike in_place
exp.out TW> channels_last_alike in_place
expand_copy.out TIbW> contiguous complex
expm1.out TW>
fill.Scalar_out TnW>
fill.Tensor_out TTW>
flip.out TIW>
floor.out TW>
floor_divide.out TTW> divides promoted(0,1)
fmod.Scalar_out TnW>
fmod.Tensor_out TTW> promoted(0,1)
full.out InW>
full_like.out TnjW> contiguous
gather.out TiTbW>
ge.Scalar_out TnW> channels_last_alike
ge.Tensor_out TTW> channels_last_alike promoted(0,1)
gelu.out TsW> channels_last_alike in_place
glu.out TiW>
grid_sampler_2d.out TTiibW> contiguous
gt.Scalar_out TnW> channels_last_alike
gt.Tensor_out TTW> channels_last_alike promoted(0,1)
hardtanh.out TnnW> channels_last_alike in_place
index.Tensor_out TOW> contiguous complex indices(1,0)
index_put.out TOTbW> contiguous into_self indices(1,0)
index_put_ WOTb> indices(1,0) rank(2,1)
index_select.out TiTW> contiguous complex mixed
isinf.out TW>
isnan.out TW>
le.Scalar_out TnW> channels_last_alike
le.Tensor_out TTW> channels_last_alike promoted(0,1)
leaky_relu.out TnW> channels_last_alike in_place
lift_fresh_copy.out TW>
linear.out TTtW> contiguous
log.out TW> channels_last_alike in_place
log10.out TW>
log1p.out TW>
log2.out TW>
logical_and.out TTW>
logical_not.out TW> channels_last_alike in_place
logical_or.out TTW>
logical_xor.out TTW>
logit.out TgW>
lt.Scalar_out TnW> channels_last_alike
lt.Tensor_out TTW> channels_last_alike promoted(0,1)
masked_fill.Scalar_out TTnW>
masked_scatter.out TTTW> into_self
masked_select.out TTW>
max.dim_max TibWW> contiguous
max.unary_out TW> contiguous
max_pool2d_with_indices.out TIIIIbWW> channels_last positive(1,2,4)
max_pool2d_with_indices_backward.grad_input TTIIIIbTW> positive(2,3,5) alike(7,0) computed(7)
maximum.out TTW> channels_last_alike in_place promoted(0,1)
mean.dtype_out TjW> contiguous
mean.out TJbjW> contiguous
min.dim_min TibWW> contiguous
min.unary_out TW> contiguous
minimum.out TTW> channels_last_alike in_place promoted(0,1)
mm.out TTW> contiguous
mul.Scalar_out TnW> channels_last_alike in_place complex
mul.out TTW> channels_last_alike in_place complex promoted(0,1)
narrow_copy.out TiiiW> dimension(1,0)
native_dropout.out TfcWW>
native_group_norm.out TttiiiifWWW> contiguous positive(3,4,5,6) rank(0,2) rank(1,1) rank(2,1)
native_layer_norm.out TIttfWWW> contiguous
ne.Scalar_out TnW> channels_last_alike
ne.Tensor_out TTW> channels_last_alike promoted(0,1)
neg.out TW> channels_last_alike in_place
nonzero.out TW>
ones.out IW>
permute_copy.out TIW> contiguous complex
pixel_shuffle.out TiW> contiguous positive(1)
pixel_unshuffle.out TiW> positive(1)
pow.Scalar_out nTW> channels_last_alike in_place
pow.Tensor_Scalar_out TnW> channels_last_alike in_place
pow.Tensor_Tensor_out TTW> channels_last_alike in_place promoted(0,1)
prod.int_out TibjW>
prod.out TjW>
rand.out IW>
randn.out IW>
reciprocal.out TW> channels_last_alike
reflection_pad1d.out TIW> contiguous
reflection_pad2d.out TIW> contiguous
reflection_pad3d.out TIW> contiguous
relu.out TW> channels_last_alike in_place
remainder.Scalar_out TnW> divides divisor(1,0)
remainder.Tensor_out TTW> divides promoted(0,1)
repeat.out TIW> contiguous complex
repeat_interleave.Tensor_out TjW> contiguous
replication_pad1d.out TIW>
replication_pad2d.out TIW>
replication_pad3d.out TIW>
roll.out TIIW>
round.out TW>
rsqrt.out TW> channels_last_alike in_place
rsub.Scalar_out TnnW>
scalar_tensor.out nW>
scatter.src_out TiTTW> into_self
scatter.value_out TiTnW> into_self
scatter_add.out TiTTW> contiguous into_self
select_copy.int_out TiiW> contiguous complex
select_scatter.out TTiiW> into_self
sigmoid.out TW> channels_last_alike in_place
sign.out TW>
sin.out TW> channels_last_alike in_place
sinh.out TW>
slice_copy.Tensor_out TijjiW> complex
slice_scatter.out TTijjiW> into_self
split_copy.Tensor_out TiiV> positive(1)
split_with_sizes_copy.out TIiV>
sqrt.out TW> channels_last_alike in_place
squeeze_copy.dim_out TiW> contiguous
squeeze_copy.dims_out TIW> contiguous
stack.out LiW> contiguous
sub.Scalar_out TnnW> channels_last_alike in_place complex
sub.out TTnW> channels_last_alike in_place complex promoted(0,1)
sum.IntList_out TJbjW> contiguous complex
sym_numel T>n
sym_size.int Ti>n dimension(1,0)
t_copy.out TW> contiguous
tan.out TW>
tanh.out TW> channels_last_alike in_place
topk.values TiibbWW>
transpose_copy.int_out TiiW> contiguous
tril.out TiW> contiguous
trunc.out TW>
unbind_copy.int_out TiV> contiguous
unfold_copy.out TiiiW> positive(3) wrapped(1,0)
unsqueeze_copy.out TiW> contiguous
upsample_bilinear2d.vec_out TJbFW> channels_last
upsample_nearest2d.vec_out TJFW> channels_last
var.correction_out TJmbW> contiguous
var.out TJbbW> contiguous
var_mean.correction_out TJmbWW>
view_as_real_copy.out TW> complex mixed
view_copy.out TIW> contiguous complex shape(1)
where.self_out TTTW> channels_last_alike in_place promoted(1,2)
zeros.out IW>
""",
    "dim_order_ops": """
_clone_dim_order.out TbJW>
_empty_dim_order.out IJW>
_to_dim_order_copy.out TbJW>
""",
    "et_copy": """
_d2h_copy.out TW>
_h2d_copy.out TW>
""",
    PRIMITIVES: """
add.Scalar nn>n
ceil.Scalar n>n
eq.Scalar nn>n
et_copy_index.tensor WTi>
et_view.default TIT> complex
floordiv.Scalar nn>n divides
floordiv.int nn>n divides
ge.Scalar nn>n
gt.Scalar nn>n
le.Scalar nn>n
lt.Scalar nn>n
mod.Scalar nn>n divides
mod.int nn>n divides
mul.Scalar nn>n
neg.Scalar n>n
round.Scalar n>n
sub.Scalar nn>n
sym_float.Scalar n>n
sym_int.Scalar n>n
sym_ite.Scalar nnn>n
sym_max.Scalar nn>n
sym_min.Scalar nn>n
sym_not.Scalar n>n
truediv.Scalar nn>n
trunc.Scalar n>n
""",
}


@dataclass(frozen=True, slots=True)
class RuntimeKernel:
    """One kernel of the official runtime.

    Attributes:
        name: Full name, such as ``"aten::add.out"``; an operator without overload has no dot.
        arguments: A letter for each argument but the last, which is for the return value.
        returned: The letter of the return value; empty where it is never used.
        words: What it does with layouts, types and memory, such as ``"contiguous"``.
        positive: Positions of the arguments that must be 1 or more.
        limits: What its arguments must keep beyond their kinds.
    """

    name: str
    arguments: str
    returned: str
    words: frozenset[str]
    positive: tuple[int, ...]
    limits: tuple[Limit, ...]

    @property
    def operator(self) -> str:
        """Return the name without name space and overload, such as ``"add"``."""
        return self.name.partition("::")[2].partition(".")[0]


def _parse(space: str, row: str) -> RuntimeKernel:
    name, letters, *words = row.split()
    arguments, _, returned = letters.partition(">")
    limits = [limit for word in words if (limit := parse_limit(word)) is not None]
    positive = [word for word in words if word.startswith("positive(")]
    return RuntimeKernel(
        name=f"{space}::{name}",
        arguments=arguments,
        returned=returned,
        words=frozenset(word for word in words if "(" not in word),
        positive=tuple(int(item) for word in positive for item in word[9:-1].split(",")),
        limits=tuple(limits),
    )


@cache
def runtime_kernels() -> Mapping[str, RuntimeKernel]:
    """Return all kernels of ExecuTorch 1.4.1 by their full names."""
    kernels = [
        _parse(space, row) for space, rows in _ROWS.items() for row in rows.strip().splitlines()
    ]
    return {kernel.name: kernel for kernel in kernels}


@cache
def kernel_names() -> frozenset[str]:
    """Return the full names of the kernels of ExecuTorch 1.4.1 that compute on tensors.

    Returns:
        Names such as ``aten::add.out``; an operator without an overload has no dot. The scalar
        and view operators (``executorch_prim``) are part of the runtime and are left out.
    """
    return frozenset(name for name in runtime_kernels() if not name.startswith(PRIMITIVES))
