"""Routes of vLLM and llama.cpp, and our own: tokenization, control, status."""
