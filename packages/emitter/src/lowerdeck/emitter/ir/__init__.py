"""The functional form: values, operations, and their kernels."""
