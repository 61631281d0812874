"""What a policy means for a model."""
