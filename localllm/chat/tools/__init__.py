"""Tool calls: how each family of models writes them (`formats`), and how they are read back (`parser`)."""
