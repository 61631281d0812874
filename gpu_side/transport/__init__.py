"""The service's end of each transport."""
