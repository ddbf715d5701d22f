# SPDX-License-Identifier: Apache-2.0
import threading


class Hold:
    """The context that `hold` returns. It may be entered several times, also by several threads at the same time: each time,
    `make` makes an object that keeps the tensors on the device between its `__enter__` and its `__exit__`.
    """

    def __init__(self, make):
        self._make = make
        self._entered = []  # those that have not ended, each with the thread that entered it

    def __enter__(self):
        held = self._make()
        held.__enter__()
        self._entered.append((threading.get_ident(), held))

    def __exit__(self, *error):
        me = threading.get_ident()
        mine = [one for one in self._entered if one[0] == me] or self._entered[:]
        if mine:
            self._entered.remove(mine[-1])
            mine[-1][1].__exit__(*error)
