"""The server: HTTP, what surrounds a request of it, and the thread that runs steps, `LLM`'s too."""
