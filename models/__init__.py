"""One file per architecture over shared layers."""
