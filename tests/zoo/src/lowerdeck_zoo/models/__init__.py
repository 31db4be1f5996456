"""The programs by domain: each module ends with its table ``PROGRAMS``."""
