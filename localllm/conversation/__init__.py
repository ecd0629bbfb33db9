"""A chat as data, without Textual: what line mode and the full-screen interface share."""
