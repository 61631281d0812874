"""The reliability scorecard: a module a row; short forms run in pytest, full ones by make soak."""
