"""The passes over the functional form of a method, one a module, in the order of the pipeline."""
