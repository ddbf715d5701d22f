# SPDX-License-Identifier: Apache-2.0
"""Functions for a device that other processes use, too. Both packages have this file, by a link."""
import atexit
import os

from ._bytes import number_of_bytes

_COLUMNS = "process", "held_bytes", "fair_bytes", "wanted_bytes", "weight", "is_active"


def make_calls(module, switch):
    """Makes the functions `empty_cache`, `park`, `wake`, `share` and `share_members` of a package.

    module  its compiled part
    switch  name of the function that switches support on, for messages
    """

    def expect_enabled(call):
        if not (module.is_installed() and module.is_enabled()):
            raise RuntimeError(f"{__package__}.{call}(): no tensor can be swapped out before {switch}(True)")

    def empty_cache():
        """Releases reserved memory that nothing uses to the system. Returns the bytes; 0 before `install`."""
        return module.trim() if module.is_installed() else 0

    def park(level="host"):
        """Swaps out every tensor that is not in use, and releases the device memory that is free then to the system,
        for other processes. A tensor comes back when it is used; `wake` brings back all at once.

        level  "host", or "file": everything goes to the file tier of `install`, as far as it has room, and host
               memory is released, too

        Returns the bytes of device memory that were released. Raises RuntimeError while support is off, and
        ValueError for another level or if there is no file tier.
        """
        expect_enabled("park")
        if level not in ("host", "file"):
            raise ValueError(f"{__package__}.park(): level is \"host\" or \"file\", not {level!r}")
        if level == "file" and not module.has_file_tier():
            raise ValueError(f"{__package__}.park(\"file\"): install() was called without a file_tier")
        return module.park(level == "file")

    def wake():
        """Swaps in what is swapped out, as far as the limit allows. Returns the bytes; 0 before `install`."""
        return module.wake() if module.is_installed() else 0

    def share(file, least="32MiB", weight=1, *, idle_after=2, patience=10):
        """Shares the device with other processes that call this with the same file. They divide the limit, which must
        be the same for all of them, according to what their tensors want and to which of them are at work. Tensors
        are swapped out when another process lacks memory of its fair share, and come back when that process ends or
        rests. Call it once, before many tensors are made.

        file        a path that all of them can open, best in memory ("/dev/shm/gpu0"). The file is made if it does
                    not exist
        least       bytes that this process always gets, or text such as "32MiB"
        weight      a process with twice the weight gets twice as much if both want more than there is
        idle_after  seconds without an operation after which a process counts as resting
        patience    seconds for which an operation waits for memory from other processes before it fails

        Raises RuntimeError while support is off, and ValueError for an argument that is not as above.
        """
        least = number_of_bytes(least, "share", "least")
        expect_enabled("share")
        try:
            are_valid = 1e-6 <= weight <= 1e6 and idle_after >= 0 and patience >= 0
        except TypeError:  # not numbers
            are_valid = False
        if not are_valid:
            raise ValueError(f"{__package__}.share(): weight is from 1e-6 to 1e6, and idle_after and patience are seconds")
        module.share(os.fspath(file), least, weight, idle_after, patience)
        atexit.register(module.leave_share)

    def share_members():
        """Returns a dictionary for each process that shares the device, this one included: process (id), held_bytes,
        fair_bytes, wanted_bytes, weight and is_active (whether it is at work). Empty if the device is not shared.
        """
        return [dict(zip(_COLUMNS, row)) for row in module.share_members()] if module.is_installed() else []

    return empty_cache, park, wake, share, share_members
