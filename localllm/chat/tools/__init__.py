"""Tool calls: the formats of each model family (`formats`) and the parsers for them (`parser`)."""
