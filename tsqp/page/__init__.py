"""The chat page of `tee-runner serve --page`, for development only."""
