"""Where values lie, and how long."""
