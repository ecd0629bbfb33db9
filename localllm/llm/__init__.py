"""The facade for one model, the rules for its output, and streamed output."""
