"""What the author of a backend uses."""
