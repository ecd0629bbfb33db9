"""Models: weights loaded from a checkpoint, their KV cache, and the forward pass over shared layers."""
