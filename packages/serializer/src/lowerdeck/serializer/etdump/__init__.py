"""The ETDump file: times of events in a run, for ExecuTorch's ``Inspector``."""
