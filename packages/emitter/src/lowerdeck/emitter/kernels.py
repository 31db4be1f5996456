"""What the kernels of the official runtime can do: data, in one place.

Read from the ``executorch`` 1.4.1 wheel (:data:`RUNTIME_VERSION`): the names from its kernel
registry, the layouts and the in-place facts from the checks at the head of each kernel and by
running them. A new runtime version changes this file and no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

RUNTIME_VERSION = "1.4.1"

_NAMES = {
    "aten": """
        _adaptive_avg_pool2d.out _cdist_forward.out _conj_physical.out _fft_c2r.out _fft_r2c.out
        _local_scalar_dense _log_softmax.out _native_batch_norm_legit.no_stats_out
        _native_batch_norm_legit.out _native_batch_norm_legit_no_training.out _pdist_forward.out
        _softmax.out _to_copy.out _upsample_bilinear2d_aa.out abs.out acos.out acosh.out
        add.Scalar_out add.out addmm.out alias_copy.out amax.out amin.out any.all_out
        any.dims_out any.out arange.out arange.start_out argmax.out argmin.out
        as_strided_copy.out asin.out asinh.out atan.out atan2.out atanh.out avg_pool2d.out
        bitwise_and.Scalar_out bitwise_and.Tensor_out bitwise_left_shift.Tensor_Scalar_out
        bitwise_left_shift.Tensor_out bitwise_not.out bitwise_or.Scalar_out
        bitwise_or.Tensor_out bitwise_right_shift.Tensor_Scalar_out
        bitwise_right_shift.Tensor_out bitwise_xor.Scalar_out bitwise_xor.Tensor_out bmm.out
        cat.out ceil.out clamp.Tensor_out clamp.out clone.out constant_pad_nd.out
        convolution.out convolution_backward.out copy.out copy_ cos.out cosh.out cumsum.out
        detach_copy.out diagonal_copy.out div.Scalar_mode_out div.Scalar_out div.out
        div.out_mode elu.out embedding.out empty.out eq.Scalar_out eq.Tensor_out erf.out exp.out
        expand_copy.out expm1.out fill.Scalar_out fill.Tensor_out flip.out floor.out
        floor_divide.out fmod.Scalar_out fmod.Tensor_out full.out full_like.out gather.out
        ge.Scalar_out ge.Tensor_out gelu.out glu.out grid_sampler_2d.out gt.Scalar_out
        gt.Tensor_out hardtanh.out index.Tensor_out index_put.out index_put_ index_select.out
        isinf.out isnan.out le.Scalar_out le.Tensor_out leaky_relu.out lift_fresh_copy.out
        linear.out log.out log10.out log1p.out log2.out logical_and.out logical_not.out
        logical_or.out logical_xor.out logit.out lt.Scalar_out lt.Tensor_out
        masked_fill.Scalar_out masked_scatter.out masked_select.out max.dim_max max.unary_out
        max_pool2d_with_indices.out max_pool2d_with_indices_backward.grad_input maximum.out
        mean.dtype_out mean.out min.dim_min min.unary_out minimum.out mm.out mul.Scalar_out
        mul.out narrow_copy.out native_dropout.out native_group_norm.out native_layer_norm.out
        ne.Scalar_out ne.Tensor_out neg.out nonzero.out ones.out permute_copy.out
        pixel_shuffle.out pixel_unshuffle.out pow.Scalar_out pow.Tensor_Scalar_out
        pow.Tensor_Tensor_out prod.int_out prod.out rand.out randn.out reciprocal.out
        reflection_pad1d.out reflection_pad2d.out reflection_pad3d.out relu.out
        remainder.Scalar_out remainder.Tensor_out repeat.out repeat_interleave.Tensor_out
        replication_pad1d.out replication_pad2d.out replication_pad3d.out roll.out round.out
        rsqrt.out rsub.Scalar_out scalar_tensor.out scatter.src_out scatter.value_out
        scatter_add.out select_copy.int_out select_scatter.out sigmoid.out sign.out sin.out
        sinh.out slice_copy.Tensor_out slice_scatter.out split_copy.Tensor_out
        split_with_sizes_copy.out sqrt.out squeeze_copy.dim_out squeeze_copy.dims_out stack.out
        sub.Scalar_out sub.out sum.IntList_out sym_numel sym_size.int t_copy.out tan.out
        tanh.out topk.values transpose_copy.int_out tril.out trunc.out unbind_copy.int_out
        unfold_copy.out unsqueeze_copy.out upsample_bilinear2d.vec_out
        upsample_nearest2d.vec_out var.correction_out var.out var_mean.correction_out
        view_as_real_copy.out view_copy.out where.self_out zeros.out
    """,
    "dim_order_ops": """
        _clone_dim_order.out _empty_dim_order.out _to_dim_order_copy.out
    """,
    "et_copy": """
        _d2h_copy.out _h2d_copy.out
    """,
    "executorch_prim": """
        add.Scalar ceil.Scalar eq.Scalar et_copy_index.tensor et_view.default floordiv.Scalar
        floordiv.int ge.Scalar gt.Scalar le.Scalar lt.Scalar mod.Scalar mod.int mul.Scalar
        neg.Scalar round.Scalar sub.Scalar sym_float.Scalar sym_int.Scalar sym_ite.Scalar
        sym_max.Scalar sym_min.Scalar sym_not.Scalar truediv.Scalar trunc.Scalar
    """,
}

# Kernels that take images whose channels are innermost in memory. All others get contiguous ones.
_CHANNELS_LAST = """
    convolution max_pool2d_with_indices upsample_bilinear2d upsample_nearest2d
"""

# Elementwise kernels that take them when all their tensors have one shape: they broadcast wrongly.
_CHANNELS_LAST_ALIKE = """
    relu sigmoid tanh gelu hardtanh clamp leaky_relu elu neg exp log sqrt rsqrt sin cos erf abs
    reciprocal logical_not add sub mul div pow maximum minimum where eq ne lt le gt ge
"""

# Kernels that refuse any layout but the contiguous one.
_CONTIGUOUS_ONLY = """
    grid_sampler_2d sum _adaptive_avg_pool2d addmm arange as_strided_copy avg_pool2d bmm
    _cdist_forward diagonal_copy embedding expand_copy full_like index index_put index_select max
    mean min mm native_group_norm native_layer_norm _pdist_forward pixel_shuffle reflection_pad1d
    reflection_pad2d reflection_pad3d repeat repeat_interleave scatter_add squeeze_copy t_copy
    tril unbind_copy var view_copy stack unsqueeze_copy _native_batch_norm_legit_no_training
    _native_batch_norm_legit linear permute_copy transpose_copy select_copy
"""

# Elementwise kernels that compute element i of the output from element i of the inputs only, so
# that the output may be the very memory of an input of the same type, shape and layout.
_IN_PLACE_SAFE = """
    relu add sub mul div neg exp sigmoid tanh gelu sqrt rsqrt clamp hardtanh leaky_relu elu abs
    pow where maximum minimum logical_not sin cos erf log
    _native_batch_norm_legit_no_training
"""

# Those of them that have more outputs: the first one may be the memory of the first input.
_FIRST_OUT_IN_PLACE = "_native_batch_norm_legit_no_training"

# Kernels that copy ``self`` into the output and then write parts of it, which is the same work
# when both are one memory.
_WRITES_INTO_SELF = "index_put slice_scatter select_scatter scatter"


# Kernels that take complex numbers.
_COMPLEX = """
    add bmm cat clone div expand_copy index index_select mul permute_copy repeat select_copy
    slice_copy sub sum view_copy abs view_as_real_copy _fft_c2r _fft_r2c et_view
"""


@dataclass(frozen=True, slots=True, repr=False)
class KernelTable:
    """The kernels that a program may call.

    Attributes:
        names: Full names, such as ``"aten::add.out"``; an operator without overload has no dot.
        contiguous_only: Operators (without overload) whose kernels demand contiguous tensors.
        channels_last: Operators whose kernels take channels-last tensors.
        channels_last_alike: Operators whose kernels do so if all their tensors have one shape.
        in_place_safe: Operators whose output may be the memory of an input that is alike.
        writes_into_self: Operators whose output may be the memory of their first argument.
        first_out_in_place: Operators with several outputs of which the first may be the memory
            of the first argument.
        version: The runtime version that the table was read from.
        complex_numbers: Operators whose kernels take complex tensors.
    """

    names: frozenset[str]
    contiguous_only: frozenset[str]
    channels_last: frozenset[str]
    channels_last_alike: frozenset[str]
    in_place_safe: frozenset[str]
    writes_into_self: frozenset[str]
    first_out_in_place: frozenset[str]
    version: str = RUNTIME_VERSION
    complex_numbers: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        """Return the version and the number of kernels; their names are in ``names``."""
        return f"<KernelTable of runtime {self.version}, {len(self.names)} kernels>"

    def __contains__(self, full_name: object) -> bool:
        return full_name in self.names

    def with_kernels(self, names: Iterable[str]) -> KernelTable:
        """Return this table with custom kernels added.

        Args:
            names: Full names of out-variant kernels that the target's runtime registers, such
                as ``"mylib::fused_gelu.out"``.

        Returns:
            A new table.
        """
        return replace(self, names=self.names | frozenset(names))


def _full_names() -> frozenset[str]:
    return frozenset(f"{space}::{name}" for space, text in _NAMES.items() for name in text.split())


OFFICIAL_KERNELS = KernelTable(
    _full_names(),
    frozenset(_CONTIGUOUS_ONLY.split()),
    frozenset(_CHANNELS_LAST.split()),
    frozenset(_CHANNELS_LAST_ALIKE.split()),
    frozenset(_IN_PLACE_SAFE.split()),
    frozenset(_WRITES_INTO_SELF.split()),
    frozenset(_FIRST_OUT_IN_PLACE.split()),
    complex_numbers=frozenset(_COMPLEX.split()),
)
