"""Whether kernels compute what they must on this device, and which tile sizes are fastest there."""
