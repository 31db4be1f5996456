"""The ``.bpte`` file: a program with inputs to try it on, and the results expected of them."""
