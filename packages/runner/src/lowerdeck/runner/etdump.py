"""Write profiles as ETDump files, with ExecuTorch's event names."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lowerdeck.runner.profile import Event, Profile
from lowerdeck.serializer import ProfileEvent, RunData, write_etdump

# Event names of the ExecuTorch runtime.
_KERNEL = "native_call_"
_DELEGATE = "DELEGATE_CALL"
_CALL = "Method::execute"


def save_etdump(profiles: Profile | Sequence[Profile], path: str | os.PathLike[str]) -> int:
    """Write profiles to an ETDump file, and return its size in bytes.

    ``executorch.devtools.Inspector(etdump_path=path, etrecord=...)`` reads it; calls of a method
    become one event block with the times of all calls.

    Args:
        profiles: Results of ``LoadedMethod.profile``.
        path: The file, by convention ending in ``.etdp``.

    Raises:
        OSError: The file cannot be written; the old one is unchanged.

    Example:
        >>> import tempfile, torch
        >>> from lowerdeck.emitter import emit
        >>> from lowerdeck.runner import load, save_etdump
        >>> emitted = emit(torch.export.export(torch.nn.ReLU(), (torch.ones(2),)))
        >>> profile = load(emitted.to_bytes()).method().profile(torch.ones(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_etdump(profile, f"{folder}/profile.etdp") > 100
        True
    """
    calls = [profiles] if isinstance(profiles, Profile) else profiles
    return write_etdump([_run(profile) for profile in calls], path)


def _run(profile: Profile) -> RunData:
    events = [_written(event) for event in profile.events]
    begin = min((event.start_time for event in events), default=0)
    end = max((event.end_time for event in events), default=begin)
    return RunData(events=[*events, ProfileEvent(_CALL, begin, end)])


def _written(event: Event) -> ProfileEvent:
    return ProfileEvent(
        _name(event),
        event.start_ns,
        event.start_ns + event.duration_ns,
        event.chain,
        event.instruction,
        event.identifier,
        event.label.encode(),
    )


def _name(event: Event) -> str:
    if event.identifier is not None:
        return event.label
    if event.backend:
        return _DELEGATE
    if "::" in event.name:
        return _KERNEL + event.name.rpartition("::")[2]
    return event.name
