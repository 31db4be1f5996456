"""Generate the Python source of a module from its graph."""
