"""From loaded weights to an engine that keeps its plan."""
