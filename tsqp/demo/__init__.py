"""`tsqp demo`: the same prompt several ways, what the GPU saw of it, and proof that it is right.

Real gpu-service and tee-runner processes on loopback. The runner's requests pass through a tap on
their way to the service, so what is shown as received is what is on the wire. In the last act the
tap lies.

    acts        which policies, one after another, and what comes after them
    http_client chats with tee-runner serve
    processes   starts and ends the programs
    feed        what the tap has seen, as numbers
    lie         changes one number of one reply
    matching    reads the tokens out of it, with the public weights
    costs       where the time of a run went
    rendering   panels and tables
    verdict     compares with transformers, and with the same integers without a mask
"""
