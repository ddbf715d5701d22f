# SPDX-License-Identifier: Apache-2.0
"""Calls about a device that other processes use, too. Both packages have this file, by a link."""
import atexit
import os

from ._bytes import number_of_bytes

_COLUMNS = "process", "held_bytes", "fair_bytes", "wanted_bytes", "weight", "is_active"


def make_calls(module, switch):
    """The calls `empty_cache`, `park`, `wake`, `share` and `share_members` of a package whose compiled part is `module`;
    `switch` is the call by which its users switch support on."""

    def expect_enabled(call):
        if not (module.is_installed() and module.is_enabled()):
            raise RuntimeError(f"{__package__}.{call}(): nothing can leave before {switch}(True)")

    def empty_cache():
        """Gives memory that nothing uses back to the system. Returns the bytes."""
        return module.trim() if module.is_installed() else 0

    def park(level="host"):
        """Makes every tensor that is not in use leave, and gives the device memory that is free then back to the
        system, for other processes. What is used next comes back by itself; `wake` brings back all at once. With level
        "file" everything goes to the file tier of `install`, as far as that has room, and host memory is given back, too.
        Returns the bytes of the device that were given back."""
        expect_enabled("park")
        if level not in ("host", "file"):
            raise ValueError(f"{__package__}.park(): level is \"host\" or \"file\", not {level!r}")
        if level == "file" and not module.has_file_tier():
            raise ValueError(f"{__package__}.park(\"file\"): install() was called without a file_tier")
        return module.park(level == "file")

    def wake():
        """Brings back what is away, as far as the limit goes. Returns the bytes that came back."""
        return module.wake() if module.is_installed() else 0

    def share(file, least="32MiB", weight=1, *, idle_after=2, patience=10):
        """Shares the device with other processes that call this with the same file: they divide the limit, which is the
        same for all of them, by what their tensors want and by who is at work. Tensors leave when another process lacks
        memory that is not fairly this one's, and come back when that ends or rests. To be called once, before many
        tensors are made.

        file        any path that all can open, best in memory ("/dev/shm/gpu0"). It is made if it is not there
        least       bytes that are promised to this process, whatever the others want
        weight      one with twice the weight gets twice as much of what both want
        idle_after  seconds without an operation after which the process is not at work
        patience    seconds for which an operation waits until others have given up what it cannot do without
        """
        least = number_of_bytes(least, "share", "least")
        expect_enabled("share")
        if not weight > 0 or idle_after < 0 or patience < 0:
            raise ValueError(f"{__package__}.share(): weight is above 0, and idle_after and patience are seconds")
        module.share(os.fspath(file), least, weight, idle_after, patience)
        atexit.register(module.leave_share)

    def share_members():
        """The processes that share the device, this one among them: a dictionary for each."""
        return [dict(zip(_COLUMNS, row)) for row in module.share_members()] if module.is_installed() else []

    return empty_cache, park, wake, share, share_members
