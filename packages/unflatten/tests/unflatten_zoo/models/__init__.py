"""Models of the cases, by subject."""
