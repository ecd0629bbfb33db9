"""Token ids in, token ids out."""
