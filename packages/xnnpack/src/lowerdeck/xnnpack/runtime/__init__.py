"""The runtime half: payloads computed in Python with torch's kernels."""
