"""Supported operators, one module for each family: conditions and emitters."""
