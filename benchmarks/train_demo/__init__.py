"""Training of the demo model: a story grammar, a tokenizer and a small LLaMA."""

# Documents of the model's directory that were not trained on, one a line.
VALIDATION_FILE = "validation.txt"
