"""A program beside eager, operator by operator."""
