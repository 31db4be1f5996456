"""In which orders nodes may run."""
