"""The server: HTTP, and what surrounds a request of it."""
