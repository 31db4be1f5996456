"""Checks that the official runtime neither crashes on a file nor computes wrong values."""
