"""Pictures of `.pte` files: one HTML page that needs no network, for one file or for two."""
