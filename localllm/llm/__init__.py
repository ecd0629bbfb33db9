"""The facade for one model, what an answer must be, and the answer as it grows."""
