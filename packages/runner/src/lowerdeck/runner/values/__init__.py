"""Tensors and other values of a program: where they lie, how they are laid out and given."""
