"""The module that calls a delegate."""
