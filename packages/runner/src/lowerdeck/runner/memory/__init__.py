"""Check memory plans for overlaps, and fill dead memory with NaN."""
