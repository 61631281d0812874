"""For people: command line, demo, training of the demo model, reports."""
