"""Both ends of a stream, as the client's end is tested with."""

from tests.unit.protocol.conftest import channel, endpoint, listener, listening, little_memory

__all__ = ["channel", "endpoint", "listener", "listening", "little_memory"]
