"""The full-screen interface: Textual only, sees a ChatBackend, never torch."""
