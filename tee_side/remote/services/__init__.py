"""The services that a runner asks: which are there, whom to ask, and which stand in for others.

`plan` reads `--gpu` and says which service, or dealer, has which layers; `member` is one of
them, with its connection and handshake; `replicas` is the channel over those that stand in for each
other, what it does once one has failed, and makes one error of what several said; `connected` holds
all of them.
"""
