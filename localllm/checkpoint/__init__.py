"""What is in a model's files, without torch."""
