"""The argument kinds of the kernels in ExecuTorch 1.4.1, of which a wrong one aborts the process.

Generated from torch's own schemas of the operators that the runtime's wheel registers;
``tests/interop/test_serializer_kernels.py`` compares each line with them. One letter an argument:

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

Behind ``>`` stands what the last argument, the one for the return value, must be if it is used.
"""

from __future__ import annotations

from functools import cache

_ATEN = """
_adaptive_avg_pool2d.out TIW>
_cdist_forward.out TTfjW>
_conj_physical.out TW>
_fft_c2r.out TIiiW>
_fft_r2c.out TIibW>
_local_scalar_dense T>n
_log_softmax.out TibW>
_native_batch_norm_legit.no_stats_out TttbffWWW>
_native_batch_norm_legit.out TttWWbffWWW>
_native_batch_norm_legit_no_training.out TttTTffWWW>
_pdist_forward.out TfW>
_softmax.out TibW>
_to_copy.out TbjW>
_upsample_bilinear2d_aa.out TIbggW>
abs.out TW>
acos.out TW>
acosh.out TW>
add.Scalar_out TnnW>
add.out TTnW>
addmm.out TTTnnW>
alias_copy.out TW>
amax.out TIbW>
amin.out TIbW>
any.all_out TW>
any.dims_out TJbW>
any.out TibW>
arange.out nW>
arange.start_out nnnW>
argmax.out TjbW>
argmin.out TjbW>
as_strided_copy.out TIIjW>
asin.out TW>
asinh.out TW>
atan.out TW>
atan2.out TTW>
atanh.out TW>
avg_pool2d.out TIIIbbjW>
bitwise_and.Scalar_out TnW>
bitwise_and.Tensor_out TTW>
bitwise_left_shift.Tensor_Scalar_out TnW>
bitwise_left_shift.Tensor_out TTW>
bitwise_not.out TW>
bitwise_or.Scalar_out TnW>
bitwise_or.Tensor_out TTW>
bitwise_right_shift.Tensor_Scalar_out TnW>
bitwise_right_shift.Tensor_out TTW>
bitwise_xor.Scalar_out TnW>
bitwise_xor.Tensor_out TTW>
bmm.out TTW>
cat.out LiW>
ceil.out TW>
clamp.Tensor_out TttW>
clamp.out TmmW>
clone.out TjW>
constant_pad_nd.out TInW>
convolution.out TTtIIIbIiW>
convolution_backward.out TTTJIIIbIiBWWW>
copy.out TTbW>
copy_ WTb>
cos.out TW>
cosh.out TW>
cumsum.out TijW>
detach_copy.out TW>
diagonal_copy.out TiiiW>
div.Scalar_mode_out TnrW>
div.Scalar_out TnW>
div.out TTW>
div.out_mode TTrW>
elu.out TnnnW>
embedding.out TTibbW>
empty.out IjW>
eq.Scalar_out TnW>
eq.Tensor_out TTW>
erf.out TW>
exp.out TW>
expand_copy.out TIbW>
expm1.out TW>
fill.Scalar_out TnW>
fill.Tensor_out TTW>
flip.out TIW>
floor.out TW>
floor_divide.out TTW>
fmod.Scalar_out TnW>
fmod.Tensor_out TTW>
full.out InW>
full_like.out TnjW>
gather.out TiTbW>
ge.Scalar_out TnW>
ge.Tensor_out TTW>
gelu.out TsW>
glu.out TiW>
grid_sampler_2d.out TTiibW>
gt.Scalar_out TnW>
gt.Tensor_out TTW>
hardtanh.out TnnW>
index.Tensor_out TOW>
index_put.out TOTbW>
index_put_ WOTb>
index_select.out TiTW>
isinf.out TW>
isnan.out TW>
le.Scalar_out TnW>
le.Tensor_out TTW>
leaky_relu.out TnW>
lift_fresh_copy.out TW>
linear.out TTtW>
log.out TW>
log10.out TW>
log1p.out TW>
log2.out TW>
logical_and.out TTW>
logical_not.out TW>
logical_or.out TTW>
logical_xor.out TTW>
logit.out TgW>
lt.Scalar_out TnW>
lt.Tensor_out TTW>
masked_fill.Scalar_out TTnW>
masked_scatter.out TTTW>
masked_select.out TTW>
max.dim_max TibWW>
max.unary_out TW>
max_pool2d_with_indices.out TIIIIbWW>
max_pool2d_with_indices_backward.grad_input TTIIIIbTW>
maximum.out TTW>
mean.dtype_out TjW>
mean.out TJbjW>
min.dim_min TibWW>
min.unary_out TW>
minimum.out TTW>
mm.out TTW>
mul.Scalar_out TnW>
mul.out TTW>
narrow_copy.out TiiiW>
native_dropout.out TfcWW>
native_group_norm.out TttiiiifWWW>
native_layer_norm.out TIttfWWW>
ne.Scalar_out TnW>
ne.Tensor_out TTW>
neg.out TW>
nonzero.out TW>
ones.out IW>
permute_copy.out TIW>
pixel_shuffle.out TiW>
pixel_unshuffle.out TiW>
pow.Scalar_out nTW>
pow.Tensor_Scalar_out TnW>
pow.Tensor_Tensor_out TTW>
prod.int_out TibjW>
prod.out TjW>
rand.out IW>
randn.out IW>
reciprocal.out TW>
reflection_pad1d.out TIW>
reflection_pad2d.out TIW>
reflection_pad3d.out TIW>
relu.out TW>
remainder.Scalar_out TnW>
remainder.Tensor_out TTW>
repeat.out TIW>
repeat_interleave.Tensor_out TjW>
replication_pad1d.out TIW>
replication_pad2d.out TIW>
replication_pad3d.out TIW>
roll.out TIIW>
round.out TW>
rsqrt.out TW>
rsub.Scalar_out TnnW>
scalar_tensor.out nW>
scatter.src_out TiTTW>
scatter.value_out TiTnW>
scatter_add.out TiTTW>
select_copy.int_out TiiW>
select_scatter.out TTiiW>
sigmoid.out TW>
sign.out TW>
sin.out TW>
sinh.out TW>
slice_copy.Tensor_out TijjiW>
slice_scatter.out TTijjiW>
split_copy.Tensor_out TiiV>
split_with_sizes_copy.out TIiV>
sqrt.out TW>
squeeze_copy.dim_out TiW>
squeeze_copy.dims_out TIW>
stack.out LiW>
sub.Scalar_out TnnW>
sub.out TTnW>
sum.IntList_out TJbjW>
sym_numel T>n
sym_size.int Ti>n
t_copy.out TW>
tan.out TW>
tanh.out TW>
topk.values TiibbWW>
transpose_copy.int_out TiiW>
tril.out TiW>
trunc.out TW>
unbind_copy.int_out TiV>
unfold_copy.out TiiiW>
unsqueeze_copy.out TiW>
upsample_bilinear2d.vec_out TJbFW>
upsample_nearest2d.vec_out TJFW>
var.correction_out TJmbW>
var.out TJbbW>
var_mean.correction_out TJmbWW>
view_as_real_copy.out TW>
view_copy.out TIW>
where.self_out TTTW>
zeros.out IW>
"""

_OTHERS = {
    "dim_order_ops::_clone_dim_order.out": "TbJW>",
    "dim_order_ops::_empty_dim_order.out": "IJW>",
    "dim_order_ops::_to_dim_order_copy.out": "TbJW>",
    "et_copy::_d2h_copy.out": "TW>",
    "et_copy::_h2d_copy.out": "TW>",
}

POSITIVE_ARGUMENTS: dict[str, tuple[int, ...]] = {
    "aten::_adaptive_avg_pool2d.out": (1,),
    "aten::avg_pool2d.out": (1, 2),
    "aten::convolution.out": (3, 5, 8),
    "aten::convolution_backward.out": (4, 6, 9),
    "aten::max_pool2d_with_indices.out": (1, 2, 4),
    "aten::max_pool2d_with_indices_backward.grad_input": (2, 3, 5),
    "aten::native_group_norm.out": (3, 4, 5, 6),
    "aten::pixel_shuffle.out": (1,),
    "aten::pixel_unshuffle.out": (1,),
    "aten::split_copy.Tensor_out": (1,),
    "aten::unfold_copy.out": (3,),
}
"""Arguments by which kernels divide without a look: strides, dilations, groups and the like."""


@cache
def kernel_signatures() -> dict[str, str]:
    """Return the letters of each kernel by its full name."""
    rows = (line.split() for line in _ATEN.strip().splitlines())
    return {f"aten::{name}": letters for name, letters in rows} | _OTHERS


def kernel_names() -> frozenset[str]:
    """Return the full names of the kernels of ExecuTorch 1.4.1 that compute on tensors.

    Returns:
        Names such as ``aten::add.out``; an operator without an overload has no dot. The scalar
        and view operators (``executorch_prim``) are part of the runtime and are left out.
    """
    return frozenset(kernel_signatures())
