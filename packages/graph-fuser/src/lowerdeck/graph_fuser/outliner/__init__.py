"""Groups of nodes become submodules."""
