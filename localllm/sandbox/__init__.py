"""A child process with resource limits, and the code that runs in it."""
