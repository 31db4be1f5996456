"""Copy a program into one working graph, and cut that into the calls of modules."""
