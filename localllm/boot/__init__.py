"""Boot: from loaded weights to a running engine within its plan."""
