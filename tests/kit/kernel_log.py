"""A log of the kernel to say things in: as /dev/kmsg, one record a read, and no wait."""

import socket
from contextlib import ExitStack

# Of Linux 6.18, when this project's own VM was resumed.
RESUMED = "5,344,1305043,-;random: crng reseeded due to virtual machine fork\n"
PLUGGED = "6,345,1405043,-;usb 1-1: New USB device found\n SUBSYSTEM=usb\n DEVICE=c189:1\n"


class KernelLog(ExitStack):
    """`reader`: the file to watch."""

    def __init__(self) -> None:
        super().__init__()
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours, theirs = map(self.enter_context, pair)
        theirs.setblocking(False)
        self.reader = theirs.fileno()

    def say(self, *records: str) -> None:
        for record in records:
            self._ours.sendall(record.encode())
