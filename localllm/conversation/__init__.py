"""A chat as data, shared by line mode and the full-screen interface. No Textual."""
