"""Training of the demo model: a story grammar, a tokenizer and a small LLaMA."""
