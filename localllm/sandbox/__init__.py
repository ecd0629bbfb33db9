"""A child process with limits, and its inside."""
