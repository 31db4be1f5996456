"""How a module is called: its signature, its checks, what it takes besides."""
