"""A short name for what a method is, by which a trace of a call tells what it is of."""

from __future__ import annotations

import hashlib

from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.pte.schema import ExecutionPlan, Program, Tensor

_END = 1 << 16
_FIRST = 64


def method_digest(program: Program, plan: ExecutionPlan) -> str:
    """Return a digest of a method's code, the same for a file and for what it was written from.

    It is cheap for files of gigabytes: of each delegate the size and both ends count, and of each
    constant the first bytes. Who changes only what is between keeps the digest.

    Args:
        plan: One of its methods.

    Returns:
        32 hexadecimal digits.

    Raises:
        ProgramError: Bytes that lie in another file are not there any more.

    Example:
        >>> from lowerdeck.serializer import ExecutionPlan, Program, method_digest
        >>> plan = ExecutionPlan("forward")
        >>> len(method_digest(Program(execution_plan=[plan]), plan))
        32
    """
    code = [item.instr_args for chain in plan.chains for item in chain.instructions]
    tensors = [one.val for one in plan.values if isinstance(one.val, Tensor)]
    told = (
        [one.full_name for one in plan.operators],
        [one.id for one in plan.delegates],
        [len(chain.instructions) for chain in plan.chains],
        code,
        [(int(one.scalar_type), [*one.sizes]) for one in tensors],
        ([*plan.inputs], [*plan.outputs]),
    )
    found = hashlib.sha256(repr(told).encode())
    constants, blobs = program.constant_buffer, program.backend_delegate_data
    for one in tensors:
        at = one.data_buffer_idx
        if one.allocation_info is None and 0 < at < len(constants):
            # What is written may be padded: of what is read the tensor alone tells the size.
            view = byte_view(constants[at].storage, "a constant")
            found.update(view[: min(_FIRST, one.nbytes)])
    for at in dict.fromkeys(one.processed.index for one in plan.delegates):
        view = byte_view(blobs[at].data if 0 <= at < len(blobs) else b"", "a delegate")
        found.update(len(view).to_bytes(8, "little"))
        found.update(view[:_END])
        found.update(view[-_END:])
    return found.hexdigest()[:32]
