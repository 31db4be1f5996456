"""The API for authors of backends."""
