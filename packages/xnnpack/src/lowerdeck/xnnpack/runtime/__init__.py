"""The half that runs: payloads computed in Python with torch's kernels."""
