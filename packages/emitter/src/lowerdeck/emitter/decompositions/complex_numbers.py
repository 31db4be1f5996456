"""Decompose complex operators without a kernel into real arithmetic.

A complex number and a pair of real numbers have the same bytes, so conversions are free for static
shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload, pytree

_ATEN = torch.ops.aten
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
# Largest transform size: the transform is a product with a square matrix of this size.
_LONGEST = 4096


def _parts(number: Any) -> tuple[Any, Any]:
    """Return the real and the imaginary part of a tensor or a number."""
    if not isinstance(number, torch.Tensor):
        return number.real, number.imag
    if not number.is_complex():
        return number, 0.0
    pairs = torch.view_as_real(number)
    return pairs.select(-1, 0), pairs.select(-1, 1)


def _joined(real: torch.Tensor, imag: Any) -> torch.Tensor:
    """Return complex numbers from real and imaginary parts."""
    if not isinstance(imag, torch.Tensor):
        imag = torch.full_like(real, imag)
    if real.shape != imag.shape:
        # The sum broadcasts each part to the shape of both.
        zeros = torch.zeros_like(real), torch.zeros_like(imag)
        real, imag = real + zeros[1], imag + zeros[0]
    return torch.view_as_complex(torch.stack([real, imag], -1))


def _is_complex(number: Any) -> bool:
    if isinstance(number, torch.Tensor):
        return number.is_complex()
    return isinstance(number, complex)


def _has_kernel(left: Any, right: Any) -> bool:
    """Return whether the kernels support both operands: tensors of one dtype, static sizes."""
    tensors = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    if not tensors or left.dtype != right.dtype:
        return False
    # A complex tensor of dynamic shape cannot alias a tensor of pairs.
    return not (_varies(left) or _varies(right))


def _varies(number: torch.Tensor) -> bool:
    return not all(isinstance(size, int) for size in number.shape)


def _has_add_kernel(left: Any, right: Any) -> bool:
    """Return whether ``add`` and ``sub`` support both operands: their kernels do not broadcast."""
    return _has_kernel(left, right) and left.shape == right.shape


def product(self: torch.Tensor, other: Any) -> Any:
    """Return a product with at least one complex factor."""
    if _has_kernel(self, other):
        return NotImplemented
    (a, b), (c, d) = _parts(self), _parts(other)
    if not _is_complex(self):
        return _joined(a * c, a * d)
    if not _is_complex(other):
        return _joined(a * c, b * c)
    return _joined(a * c - b * d, a * d + b * c)


def quotient(self: torch.Tensor, other: Any) -> Any:
    """Return a quotient with at least one complex operand."""
    if _has_kernel(self, other):
        return NotImplemented
    (a, b), (c, d) = _parts(self), _parts(other)
    if not _is_complex(other):
        return _joined(a / c, b / c)
    size = c * c + d * d
    return _joined((a * c + b * d) / size, (b * c - a * d) / size)


def reciprocal(self: torch.Tensor) -> Any:
    """Return the reciprocal of complex numbers."""
    real, imaginary = _parts(self)
    size = real * real + imaginary * imaginary
    return _joined(real / size, -imaginary / size)


def total(self: torch.Tensor, other: Any, *, alpha: float = 1) -> Any:
    """Return a sum with at least one complex term.

    Args:
        alpha: Factor of ``other``.
    """
    if _has_add_kernel(self, other) and alpha == 1:
        return NotImplemented
    (a, b), (c, d) = _parts(self), _parts(other)
    return _joined(a + c * alpha, b + d * alpha)


def difference(self: torch.Tensor, other: Any, *, alpha: float = 1) -> Any:
    """Return a difference with at least one complex operand.

    Args:
        alpha: Factor of ``other``.
    """
    if _has_add_kernel(self, other) and alpha == 1:
        return NotImplemented
    return total(self, other, alpha=-alpha)


def conjugate(self: torch.Tensor) -> Any:
    """Return complex conjugates."""
    if not self.is_complex():
        return self.clone()
    real, imaginary = _parts(self)
    return _joined(real, -imaginary)


def polar(abs: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's
    """Return complex numbers from absolute values and angles."""
    return _joined(abs * torch.cos(angle), abs * torch.sin(angle))


def exponential(self: torch.Tensor) -> Any:
    """Return the exponential of complex numbers."""
    real, imaginary = _parts(self)
    return polar(torch.exp(real), imaginary)


def cast(self: torch.Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Return a conversion from or to a complex dtype.

    Args:
        **options: Other arguments of :func:`torch.Tensor.to`.
    """
    target = self.dtype if dtype is None else dtype
    if not (target.is_complex or self.is_complex()):
        return NotImplemented
    real, imaginary = _parts(self)
    if not target.is_complex:
        return real.to(target, **options)
    if target == self.dtype or target not in _REAL:
        return NotImplemented
    real = real.to(_REAL[target])
    if not self.is_complex():
        return _joined(real, torch.zeros_like(real))
    return _joined(real, imaginary.to(_REAL[target]))


def angle(self: torch.Tensor) -> Any:
    """Return the angles of complex numbers."""
    real, imaginary = _parts(self)
    return torch.atan2(imaginary, real)


def _on_pairs(change: Callable[..., torch.Tensor], *, fixed: bool = True) -> Callable[..., Any]:
    """Return a rule that applies ``change`` to complex tensors, viewed as pairs of real numbers.

    Args:
        fixed: Whether the rule also applies to static shapes, for which a kernel may exist.
    """

    def rule(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not (fixed or _varies(self)):
            return NotImplemented
        real, imaginary = _parts(self)
        return _joined(change(real, *args, **options), change(imaginary, *args, **options))

    return rule


def chosen(condition: torch.Tensor, self: torch.Tensor, other: torch.Tensor) -> Any:
    """Return ``where`` of complex tensors."""
    (a, b), (c, d) = _parts(self), _parts(other)
    return _joined(torch.where(condition, a, c), torch.where(condition, b, d))


def stacked(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """Return ``stack`` of complex tensors."""
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def concatenated(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """Return ``cat`` of complex tensors with a dynamic shape."""
    if not any(tensor.is_complex() and _varies(tensor) for tensor in tensors):
        return NotImplemented
    pairs = [_parts(tensor if tensor.is_complex() else tensor + 0j) for tensor in tensors]
    return _joined(*(torch.cat([pair[part] for pair in pairs], dim) for part in (0, 1)))


def absolute(self: torch.Tensor) -> Any:
    """Return ``abs`` of a complex tensor with a dynamic shape."""
    if not _varies(self):
        return NotImplemented
    real, imaginary = _parts(self)
    return torch.hypot(real, imaginary)


def split(self: torch.Tensor, split_sizes: Sequence[int], dim: int = 0) -> Sequence[torch.Tensor]:
    """Return ``split_with_sizes`` of complex tensors."""
    starts = [sum(split_sizes[:index]) for index in range(len(split_sizes))]
    return [
        torch.narrow(self, dim, start, size)
        for start, size in zip(starts, split_sizes, strict=True)
    ]


def unbind(self: torch.Tensor, dim: int = 0) -> Sequence[torch.Tensor]:
    """Return ``unbind`` of complex tensors."""
    return [torch.select(self, dim, index) for index in range(self.size(dim))]


def transform(self: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    """Return a discrete Fourier transform as matrix products.

    Args:
        dim: The dimensions to transform.
        normalization: 0 for none, 1 to divide by the square root of the size, 2 by the size.
        forward: False for the inverse transform.
    """
    if not _transformable(self, dim):
        return NotImplemented
    pairs = _parts(self)
    real, imaginary = pairs
    size = 1
    for axis in dim:
        length = self.size(axis)
        size *= length
        steps = torch.arange(length)
        turns = torch.outer(steps, steps) % length
        full = 2 * math.pi * (-1 if forward else 1)
        fixed = isinstance(length, int)
        turns = turns.to(real.dtype)
        angles = turns * (full / length) if fixed else turns * full / length
        cosine, sine = torch.cos(angles), torch.sin(angles)
        real, imaginary = (part.transpose(axis, -1) for part in (real, imaginary))
        real, imaginary = real @ cosine - imaginary @ sine, real @ sine + imaginary @ cosine
        real, imaginary = (part.transpose(axis, -1) for part in (real, imaginary))
    if normalization == 0:
        return _joined(real, imaginary)
    scale = size if normalization == 2 else torch.sym_sqrt(size)
    return _joined(real / scale, imaginary / scale)


def transform_of_real(
    self: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool
) -> Any:
    """Return the Fourier transform of real numbers, with both halves of the spectrum.

    Args:
        dim: The dimensions to transform.
        normalization: As for :func:`transform`.
        onesided: Whether only the first half is requested, for which a kernel exists.
    """
    if onesided or not _transformable(self, dim):
        return NotImplemented
    return transform(_joined(self, torch.zeros_like(self)), dim, normalization, True)


def _transformable(self: torch.Tensor, dim: Sequence[int]) -> bool:
    sizes = [self.size(axis) for axis in dim]
    return all(size <= _LONGEST for size in sizes if isinstance(size, int))


def _if_complex(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule for calls with a complex argument, alone or in a list."""

    @wraps(rule)
    def of_complex(*args: Any, **options: Any) -> Any:
        operands = pytree.tree_leaves((args, options))
        return rule(*args, **options) if any(map(_is_complex, operands)) else NotImplemented

    return of_complex


# Operators that only move elements: they have complex kernels, but with a dynamic shape their
# tensors cannot alias pairs.
_MOVEMENTS = (
    *(_ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.transpose.int),
    *(_ATEN.permute.default, _ATEN.view.default, _ATEN.expand.default, _ATEN.slice.Tensor),
    *(_ATEN.select.int, _ATEN.clone.default, _ATEN.index_select.default, _ATEN.repeat.default),
)

_OF_COMPLEX_NUMBERS: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.mul.Tensor: product,
    _ATEN.mul.Scalar: product,
    _ATEN.div.Tensor: quotient,
    _ATEN.div.Scalar: quotient,
    _ATEN.reciprocal.default: reciprocal,
    _ATEN.add.Tensor: total,
    _ATEN.sub.Tensor: difference,
    _ATEN.exp.default: exponential,
    _ATEN.where.self: chosen,
    _ATEN.stack.default: stacked,
    _ATEN.cat.default: concatenated,
    _ATEN.abs.default: absolute,
    _ATEN.sum.dim_IntList: _on_pairs(torch.sum, fixed=False),
    _ATEN.angle.default: angle,
    _ATEN.mean.default: _on_pairs(torch.mean),
    _ATEN.mean.dim: _on_pairs(torch.mean),
    _ATEN.neg.default: _on_pairs(torch.neg),
    _ATEN.flip.default: _on_pairs(torch.flip),
    _ATEN.roll.default: _on_pairs(torch.roll),
    _ATEN.constant_pad_nd.default: _on_pairs(torch.constant_pad_nd),
    _ATEN.split_with_sizes.default: split,
    _ATEN.unbind.int: unbind,
    _ATEN._fft_c2c.default: transform,
    **{movement: _on_pairs(movement, fixed=False) for movement in _MOVEMENTS},
}
COMPLEX_NUMBERS: dict[OpOverload, Callable[..., Any]] = {
    **{target: _if_complex(rule) for target, rule in _OF_COMPLEX_NUMBERS.items()},
    _ATEN._conj.default: conjugate,
    _ATEN._conj_physical.default: conjugate,
    _ATEN.complex.default: _joined,
    _ATEN.polar.default: polar,
    _ATEN._to_copy.default: cast,
    _ATEN._fft_r2c.default: transform_of_real,
}
