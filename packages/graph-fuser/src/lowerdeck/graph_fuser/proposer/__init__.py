"""Which nodes can be one group."""
