"""Messages to prompt text, and streamed text back to content and reasoning."""
