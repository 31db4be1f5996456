"""The modules that ``unflatten`` returns."""
