"""Checks that the official runtime neither crashes nor errs on a file."""
