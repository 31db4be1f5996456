"""Analysis, rewriting and copies of exported programs."""
