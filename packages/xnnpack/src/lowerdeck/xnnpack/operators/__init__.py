"""One module for each family of operators: what is accepted, and how it is emitted."""
