"""Three implementations of `ChatBackend`: in this process, over HTTP, and scripted for tests and screenshots."""
