"""The ETDump file: times of parts of a run, for ExecuTorch's ``Inspector``."""
