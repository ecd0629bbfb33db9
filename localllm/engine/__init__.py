"""The inference engine: token ids in, token ids out."""
