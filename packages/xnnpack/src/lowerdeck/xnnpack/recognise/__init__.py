"""Operators that came apart: found in their pieces, and compiled as if they were whole."""
