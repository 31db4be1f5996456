"""The ``.ptd`` file, and models split over several files."""
