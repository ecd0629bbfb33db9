"""The chat screen, by parts."""
