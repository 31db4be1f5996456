"""Digest of a method's code, which identifies the method in a trace."""

from __future__ import annotations

import hashlib

from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.pte.schema import ExecutionPlan, Program, Tensor

_END = 1 << 16  # hashed bytes at each end of a delegate
_FIRST = 64  # hashed bytes of a constant


def method_digest(program: Program, plan: ExecutionPlan) -> str:
    """Return a digest of a method's code, equal for a program and the file written from it.

    To be fast for large files, the digest covers only the size and both ends of each delegate and
    the first bytes of each constant; changes in other bytes are not detected.

    Args:
        plan: A method of ``program``.

    Returns:
        32 hexadecimal digits.

    Raises:
        ProgramError: The file of a ``FileRange`` is shorter than the range.
        OSError: The file of a ``FileRange`` no longer exists.

    Example:
        >>> from lowerdeck.serializer import ExecutionPlan, Program, method_digest
        >>> plan = ExecutionPlan("forward")
        >>> len(method_digest(Program(execution_plan=[plan]), plan))
        32
    """
    code = [item.instr_args for chain in plan.chains for item in chain.instructions]
    tensors = [value.val for value in plan.values if isinstance(value.val, Tensor)]
    description = (
        [operator.full_name for operator in plan.operators],
        [delegate.id for delegate in plan.delegates],
        [len(chain.instructions) for chain in plan.chains],
        code,
        [(int(tensor.scalar_type), [*tensor.sizes]) for tensor in tensors],
        ([*plan.inputs], [*plan.outputs]),
    )
    digest = hashlib.sha256(repr(description).encode())
    constants, blobs = program.constant_buffer, program.backend_delegate_data
    for tensor in tensors:
        at = tensor.data_buffer_idx
        if tensor.allocation_info is None and 0 < at < len(constants):
            # Constants from a file may include padding; the tensor gives their size.
            view = byte_view(constants[at].storage, "a constant")
            digest.update(view[: min(_FIRST, tensor.nbytes)])
    for at in dict.fromkeys(delegate.processed.index for delegate in plan.delegates):
        view = byte_view(blobs[at].data if 0 <= at < len(blobs) else b"", "a delegate")
        digest.update(len(view).to_bytes(8, "little"))
        digest.update(view[:_END])
        digest.update(view[-_END:])
    return digest.hexdigest()[:32]
