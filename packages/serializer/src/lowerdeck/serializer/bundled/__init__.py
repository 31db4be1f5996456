"""The ``.bpte`` file: a program with test inputs and expected results."""
