"""The tables of a file become a logical program; nothing in them is trusted."""
