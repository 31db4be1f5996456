"""From the functional form to the instructions and values of a program."""
