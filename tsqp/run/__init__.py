"""What the programs and `tsqp.LLM` share: settings, loading, trust, evidence and the server."""
