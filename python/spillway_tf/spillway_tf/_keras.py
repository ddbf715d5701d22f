# SPDX-License-Identifier: Apache-2.0
"""A callback for `model.fit`."""
import csv
import time
import warnings

import tensorflow as tf

from ._load import C

COLUMNS = ("bytes_in_use", "peak_bytes_in_use", "bytes_active", "peak_bytes_active", "bytes_inactive",
           "current_bytes_reclaimed", "peak_bytes_reclaimed", "bytes_reclaimed", "num_single_reclaims",
           "num_full_reclaims", "num_allocs", "largest_alloc_size", "bytes_limit", "swap_out_bytes", "swap_in_bytes",
           "dropped_bytes", "prefetch_hits", "mispredictions", "num_ooms")


class LMSStatsLogger(tf.keras.callbacks.Callback):
    """A callback for `model.fit` that writes a line of statistics for each step into a CSV file. Counts grow through
    the whole run. Peaks and the largest allocation are those of the step: the callback resets them before each step,
    also for other readers.

    If Keras runs several steps at once (`steps_per_execution`), a line is for all of these, under the number of the
    last one.

    path   name of the file, which is overwritten
    start  number of the first step to log, from 0
    stop   number of the first step not to log any more; default: log all
    """

    def __init__(self, path, start=0, stop=None):
        super().__init__()
        self._path, self._start, self._stop = path, start, stop
        self._file = self._rows = None
        self._step = 0
        self._epoch = 0
        self._first_batch = 0
        self._began = 0.0

    def on_train_begin(self, logs=None):
        if getattr(self.model, "jit_compile", False) and not self.model.run_eagerly and C.is_installed():
            warnings.warn("spillway_tf: Keras compiles the training step into one operation, all of whose tensors have to "
                          "fit together: compile the model with jit_compile=False", stacklevel=2)
        self._close()  # if the training before has ended in an error
        self._file = open(self._path, "w", newline="")
        self._rows = csv.writer(self._file)
        self._rows.writerow(("step", "epoch", "seconds", "loss") + COLUMNS)
        self._step = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if C.is_installed():
            C.reset_peaks()
        self._first_batch = batch
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        seconds = time.perf_counter() - self._began
        steps = (self.params or {}).get("steps")  # of an epoch; None while that is not known
        if steps:
            batch = min(batch, steps - 1)  # Keras counts on where an epoch ends within several steps at once
        last = self._step + batch - self._first_batch
        if last >= self._start and (self._stop is None or self._step < self._stop):
            now = C.raw_stats() if C.is_installed() else {}
            loss = (logs or {}).get("loss", "")
            self._rows.writerow([last, self._epoch, f"{seconds:.6f}", loss] + [now.get(c, 0) for c in COLUMNS])
            self._file.flush()
        self._step = last + 1

    def on_train_end(self, logs=None):
        self._close()

    def _close(self):
        """Closes the file, and forgets it, since a callback with a file could not be copied."""
        if self._file is not None:
            self._file.close()
        self._file = self._rows = None
