"""Try backends and partitioners on generated programs."""
