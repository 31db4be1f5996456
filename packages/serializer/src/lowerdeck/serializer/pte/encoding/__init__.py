"""A logical program becomes the tables of a file."""
