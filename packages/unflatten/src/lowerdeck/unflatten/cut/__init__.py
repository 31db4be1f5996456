"""Copy a program into a working graph and cut it into module calls."""
