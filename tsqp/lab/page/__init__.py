"""The frame that pages of reports have in common: style, tables, pictures."""
