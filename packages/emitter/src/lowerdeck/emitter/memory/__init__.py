"""Memory planning: lifetimes and placement of storages."""
