"""Self-contained HTML pages about one `.pte` file or about two."""
