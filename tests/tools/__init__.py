"""Tools that break things on purpose: a proxy with faults, and a service that lies."""
