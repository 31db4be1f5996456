"""The Python source of a module, and what it names."""
