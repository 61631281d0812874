"""Guest images for confidential VMs: building them, and what a processor measures of them."""
