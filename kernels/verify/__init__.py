"""Self-test of kernels against their references on this device, and tuning of tile sizes."""
