"""Starts programs on several processes that cannot outlive a test: a session of their own, and a hard end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PROGRAM = Path(__file__).with_name("program.py")
LIMIT = 150.0  # seconds


def train(folder: Path, name: str, **spec: Any) -> list[dict[str, Any]]:
    """Runs ``program.py`` as Lightning starts it, and returns what each process wrote.

    Args:
        folder: For files.
        name: Of the files, new for each call.
        spec: What to do; see there.
    """
    return _written(folder, name, [sys.executable, str(PROGRAM)], spec, count=1)


def train_with_torchrun(folder: Path, name: str, *, nodes: int, **spec: Any) -> list[dict[str, Any]]:
    """The same with one ``torchrun`` on each of so many machines, which are all this one."""
    port = _free_port()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--node-rank={index}"),
        *("--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", str(PROGRAM)),
    ]
    return _written(folder, name, command, {**spec, "ranks": 1, "nodes": nodes}, count=nodes)


def _written(folder: Path, name: str, command: list[str], spec: dict[str, Any], *, count: int) -> list[dict[str, Any]]:
    spec_file, out = folder / f"{name}.json", folder / name
    spec_file.write_text(json.dumps(spec))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"):
        environment.pop(variable, None)
    started = []
    try:
        for index in range(count):
            words = [word.format(index=index) if word.startswith("--") else word for word in command]
            started.append(
                subprocess.Popen(
                    [*words, str(spec_file), str(out)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        texts = [process.communicate(timeout=LIMIT)[0] for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert all(process.returncode == 0 for process in started), "\n".join(texts)
    files = sorted(folder.glob(f"{name}.[0-9]*"))
    return [torch.load(file, weights_only=True) for file in files]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
