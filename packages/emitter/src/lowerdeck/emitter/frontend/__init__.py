"""Convert an exported program to the functional IR."""
