"""Routes of vLLM and llama.cpp, and our own: text, control, status."""
