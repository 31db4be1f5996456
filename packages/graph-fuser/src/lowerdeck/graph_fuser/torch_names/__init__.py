"""Names and signatures that callers of torch know."""
