"""Checks for files on which the official runtime crashes or computes wrong values."""
