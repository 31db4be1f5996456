"""What is known of an exported program, and copies of it."""
