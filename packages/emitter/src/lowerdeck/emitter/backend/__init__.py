"""Lower the functional IR to the instructions and values of a program."""
