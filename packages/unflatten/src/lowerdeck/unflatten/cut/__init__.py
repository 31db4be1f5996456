"""The graph of a program cut into those of its modules."""
