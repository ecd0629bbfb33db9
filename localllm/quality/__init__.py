"""Making a model smaller, and measuring what that costs."""
