"""Keys of calls, and templates of their decompositions."""
