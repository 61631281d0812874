"""What the tests share: models, services, lies, clocks, and what is written to a wire."""
