"""Quantizing a model, and measuring the quality it loses."""
