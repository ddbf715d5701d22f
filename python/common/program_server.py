# SPDX-License-Identifier: Apache-2.0
"""Runs the Python programs of tests in new processes that do not import a framework first, which takes longer than most of
the programs: a server imports it once, and each program runs in a fork of the server.

A program runs as `python -c` would run it: in an empty `__main__`, to the end of the interpreter. What differs is that the
framework is imported already. Importing it must not start threads that programs need, since a fork does not have them; the
stand-in for the CUDA runtime starts such threads, so its tests do not use this.
"""
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile


class ProgramServer:
    def __init__(self, module):
        self._server = subprocess.Popen(
            [sys.executable, "-c", f"exec(__import__('program_server').next_program({module!r}))"],
            bufsize=0,  # since `select` does not know what is in a buffer
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=pathlib.Path(__file__).resolve().parent)

    def run(self, code, folder, timeout=300, **environment):
        """Runs a program in a folder and returns a `subprocess.CompletedProcess`. Some environment variables only count when
        a process starts, so a program with an environment of its own starts anew."""
        if environment:
            return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, cwd=folder,
                                  env={**os.environ, **environment})
        with tempfile.TemporaryDirectory() as outputs:
            paths = [os.path.join(outputs, name) for name in ("stdout", "stderr")]
            self._server.stdin.write(json.dumps([code, str(folder), *paths]).encode() + b"\n")
            program = int(self._server.stdout.readline())
            is_late = not select.select([self._server.stdout], [], [], timeout)[0]
            if is_late:
                os.killpg(program, signal.SIGKILL)
            status = int(self._server.stdout.readline())
            out, error = (pathlib.Path(path).read_text() for path in paths)
        if is_late:
            raise subprocess.TimeoutExpired(code, timeout, out, error)
        return subprocess.CompletedProcess(code, status, out, error)

    def close(self):
        self._server.stdin.close()
        self._server.wait()


def next_program(module):
    """The server: starts a process for each program that it is asked for. Returns in the new process, the program."""
    __import__(module)
    for request in iter(sys.stdin.readline, ""):
        program = os.fork()
        if program == 0:
            return _begin(*json.loads(request))
        print(program, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]), flush=True)
    sys.exit()


def _begin(code, folder, out, error):
    os.setpgid(0, 0)  # so that the program can be ended with the processes that it has started
    for number, path in enumerate((os.devnull, out, error)):
        opened = os.open(path, os.O_CREAT | os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(folder)
    return compile(code, "<string>", "exec")
