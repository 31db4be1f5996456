"""Encodings of elements and orders of dimensions of the values of a payload."""
