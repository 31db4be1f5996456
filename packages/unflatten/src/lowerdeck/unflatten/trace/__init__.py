"""What an exported program tells of the modules that it came from."""
