"""Digest of a method's code, by which a trace identifies the method it recorded."""

from __future__ import annotations

import hashlib

from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.pte.schema import ExecutionPlan, Program, Tensor

_END = 1 << 16
_FIRST = 64


def method_digest(program: Program, plan: ExecutionPlan) -> str:
    """Return a digest of a method's code, the same for a file and for what it was written from.

    It is cheap for files of gigabytes: of each delegate the size and both ends count, and of each
    constant the first bytes. A change between those bytes keeps the digest.

    Args:
        plan: One of its methods.

    Returns:
        32 hexadecimal digits.

    Raises:
        ProgramError: Bytes stored in another file no longer exist.

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
            # Constants that were read may be padded: their size is that of the tensor.
            view = byte_view(constants[at].storage, "a constant")
            digest.update(view[: min(_FIRST, tensor.nbytes)])
    for at in dict.fromkeys(delegate.processed.index for delegate in plan.delegates):
        view = byte_view(blobs[at].data if 0 <= at < len(blobs) else b"", "a delegate")
        digest.update(len(view).to_bytes(8, "little"))
        digest.update(view[:_END])
        digest.update(view[-_END:])
    return digest.hexdigest()[:32]
