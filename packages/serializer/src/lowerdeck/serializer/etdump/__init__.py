"""The ETDump file: what took how long while a program ran, for ExecuTorch's ``Inspector``."""

from lowerdeck.serializer.etdump.etdump_write import serialize_etdump, write_etdump
from lowerdeck.serializer.etdump.events import ProfileEvent, RunData

__all__ = ["ProfileEvent", "RunData", "serialize_etdump", "write_etdump"]
