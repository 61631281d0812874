"""Attestation: evidence of what runs, its verification, and its appraisal by a policy."""
