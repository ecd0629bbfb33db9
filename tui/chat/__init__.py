"""The chat screen, split into parts."""
