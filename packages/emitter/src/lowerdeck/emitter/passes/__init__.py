"""Passes over the functional IR of a method, one per module."""
