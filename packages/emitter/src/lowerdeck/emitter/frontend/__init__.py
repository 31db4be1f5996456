"""From an exported program to the functional form."""
