"""How a weight is stored: one module per format."""
