"""C sources for the CPU and their loader."""
