"""Move partitions to submodules, and replace them by delegates."""
