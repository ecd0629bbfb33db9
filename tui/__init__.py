"""The full-screen interface: built on Textual, it sees a `ChatBackend` and never torch."""
