"""The instructions of a method, and the order in which they may run."""
