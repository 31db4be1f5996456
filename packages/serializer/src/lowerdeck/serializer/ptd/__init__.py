"""The ``.ptd`` file, and a model that lies in several files."""
