"""The services that a runner asks: which are there, whom to ask, and who stands in for whom.

`plan` reads `--gpu` and says who has which share of which layers; `member` is one service, with its
connection and handshake; `replicas` is the channel over those that stand in for each other;
`aggregate` makes one error of what several said; `connected` holds all of them.
"""
