"""`tsqp demo`: the same prompt several ways, what the GPU saw of it, and proof that it is right.

Real gpu-service and tee-runner processes on loopback. The runner's requests pass through a tap on
their way to the service, so what is shown as received is what is on the wire. In the last act the
tap lies.

    acts        which policies, one after another, and what comes after them
    programs    starts and ends the programs, chats with tee-runner serve, and has the tap: it
                stands on the wire, collects what it sees, and changes one number of one reply
    verdict     compares with transformers, with the same integers without a mask, and what was
                read out of what crossed with what went in (`tsqp.page.seen` reads it); panels and
                tables, and where the time of a run went
"""
