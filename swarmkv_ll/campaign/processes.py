"""Peers as processes of their own: started with the whole machine's CPUs, waited for within limits, always ended."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from ..errors import PeerError
from ..ffi import LIB_DIR, SPIN_COUNT
from .machine import CPUS

START_LIMIT_S = 120.0
RUN_LIMIT_S = 900.0
END_LIMIT_S = 5.0

_LAUNCH = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)})  # PR_SET_PDEATHSIG: it ends when the thread that started it does
if os.getppid() != int(sys.argv[1]):
    sys.exit("who started this is gone")
os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
os.execv(sys.argv[3], sys.argv[3:])
"""


def run(name: str, command: Sequence[str | Path], cwd: Path, *, stdin: str = "", limit_s: float = RUN_LIMIT_S) -> str:
    """Run a program, called `name` in errors, to its end; gives its standard output.

    Raises
    ------
    PeerError
        It could not be started, failed, or took too long (it is killed then).
    """
    try:
        done = subprocess.run(
            _launched(command),
            cwd=cwd,
            env=_environment(),
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"{name} had not ended after {limit_s:g} s") from None
    if done.returncode:
        raise PeerError(f"{name} {_how(done.returncode)}{_said(done.stderr or done.stdout)}")
    return done.stdout


class Server:
    """A HTTP server that is started for a block and ended with it.

    Parameters
    ----------
    name : str
        For errors.
    command : sequence of str or path
        Is given ``--host`` and ``--port`` too.
    cwd : path
    start_limit_s, request_limit_s : float

    Raises
    ------
    PeerError
        On entering: it ended, or did not answer `/health` in time.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        cwd: Path,
        *,
        start_limit_s: float = START_LIMIT_S,
        request_limit_s: float = RUN_LIMIT_S,
    ) -> None:
        self._name, self._command, self._cwd = name, command, cwd
        self._start_limit_s, self._request_limit_s = start_limit_s, request_limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self._log = tempfile.TemporaryFile()  # closed by `_end`
        try:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port: int = free.getsockname()[1]
            self._process = subprocess.Popen(
                _launched([*self._command, "--host", "127.0.0.1", "--port", str(self.port)]),
                cwd=self._cwd,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, path: str, body: object) -> Any:
        """POST JSON, and give the JSON that is answered.

        Raises
        ------
        PeerError
            It did not answer in time, or not with status 200 and JSON.
        """
        try:
            status, answer = self._request("POST", path, json.dumps(body), self._request_limit_s)
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise PeerError(f"{self._name} did not answer {path}: {why}{self._ending()}") from None
        if status != 200:
            raise PeerError(f"{self._name} answered {path} with status {status}{_said(answer)}")
        try:
            return json.loads(answer)
        except ValueError:
            raise PeerError(f"{self._name} answered {path} with what is no JSON{_said(answer)}") from None

    def ask_together(self, path: str, bodies: Sequence[object]) -> list[Any]:
        """POST all at the same time, each on a connection of its own; gives the answers in the requests' order.

        Raises
        ------
        PeerError
            As `ask`, when the first of them fails.
        """
        pool = ThreadPoolExecutor(len(bodies))
        try:
            jobs = [pool.submit(self.ask, path, body) for body in bodies]
            for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                job.result()
            return [job.result() for job in jobs]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # those that are left end with the server

    def _request(self, method: str, path: str, body: str | None, limit_s: float) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit_s)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", errors="replace")
        finally:
            connection.close()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        end = time.monotonic() + self._start_limit_s
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise PeerError(f"{self._name} did not start{self._ending()}")
            try:
                if self._request("GET", "/health", None, 1.0)[0] == 200:
                    return
            except (OSError, http.client.HTTPException):  # it does not listen yet
                pass
            time.sleep(0.05)
        raise PeerError(
            f"{self._name} did not say that it is ready within {self._start_limit_s:g} s{_said(self._written())}"
        )

    def _ending(self) -> str:
        """How it ended, if it did, and what it wrote last."""
        assert self._process is not None
        try:
            how = f"; it {_how(self._process.wait(0.2))}"
        except subprocess.TimeoutExpired:
            how = ""
        return how + _said(self._written())

    def _written(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 2000, max(0, size - 2000)).decode("utf-8", errors="replace")

    def _end(self) -> None:
        process = self._process
        try:
            if process is not None:
                process.terminate()
                process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process is not None:
                process.kill()  # does nothing to one that has ended
                process.wait()
            self._log.close()


def shown(command: Sequence[str | Path]) -> str:
    """A command as one line, with file names in the place of paths."""
    return " ".join(Path(part).name if os.path.isabs(part) else str(part) for part in command)


def _launched(command: Sequence[str | Path]) -> list[str]:
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), ",".join(map(str, sorted(CPUS)))]
    return [*launcher, *map(str, command)]


def _environment() -> dict[str, str]:
    """This process's, with our libraries, and threads that wait for each other as ours do.

    Each option of llama.cpp's tools has a variable too; those that the user has set are meant for other runs.
    """
    found = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "GGML_"))}
    found["LD_LIBRARY_PATH"] = os.pathsep.join([str(LIB_DIR), *filter(None, [found.get("LD_LIBRARY_PATH")])])
    if "OMP_WAIT_POLICY" not in found:
        found.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    return found


def _how(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _said(text: str) -> str:
    """The end of what a program wrote, to stand at the end of a message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f": {' / '.join(lines[-3:])[-500:]}" if lines else ""
