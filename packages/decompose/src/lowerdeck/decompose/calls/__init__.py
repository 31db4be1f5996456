"""Calls as keys, and the templates that they become."""
