"""Reference runtime: executes payloads in Python with torch's kernels."""
