"""What `gpu-service` does without options: its command line shows these.

Apart, because what uses them takes a while to import.
"""

# Requests that may wait: of one client, and of all together.
QUEUED_REQUESTS = 64
QUEUED_TOTAL_REQUESTS = 1024
# How many times the bytes that one client may have waiting, all of them together may.
ALL_CLIENTS = 4
# Seconds to go on with what was taken, once told to stop.
DRAIN_S = 30.0
# Seconds after its last use for which a session of a Segment is kept.
SESSION_TTL_S = 3600.0
