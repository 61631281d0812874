"""Where each microsecond and byte of a step goes: `tsqp bench` and `tsqp plan`."""
