"""The functional IR: values, operations and their kernels."""
