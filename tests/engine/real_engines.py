"""Real vLLM servers for tests: their environment, the models they serve, the processes.

The environment is large (2-3 GB) and slow to make, so it is kept outside the clone, under a hash of what it holds; so
are the models, which are made locally. Nothing here is skipped when it cannot be had: it fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from harness import HANG_GUARD_S, eventually, unmeasured

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
MODEL_SCRIPT = HERE / "make_model.py"
PLUGIN = HERE.parents[1] / "vllm_adapters" / "stat_logger"
START_GUARD_S = 300.0
"""Importing torch three times over on two cores takes a minute or two."""
SIZES = {"tiny": (2, 128), "mid": (8, 512)}
"""Layers and hidden size. In `mid` a cached prefix shows in the latency; `tiny` is for everything else."""
_UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Come along as CUDA builds that break the import; a server of text needs none of them."""


def cache_folder() -> Path:
    """Where environments and models are kept; POINTSMAN_CACHE says otherwise."""
    base = os.environ.get("POINTSMAN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "pointsman"
    folder = Path(base).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


@contextlib.contextmanager
def _made_once(folder: Path) -> Iterator[bool]:
    """True if `folder` is for the caller to make; another process that makes it is waited for."""
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / ".complete"
        if done.exists():
            yield False
            return
        shutil.rmtree(folder, ignore_errors=True)
        yield True
        done.touch()


def python_with_vllm() -> Path:
    """The interpreter of the engine's environment, which is made if there is none yet."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}".encode()
    folder = cache_folder() / f"vllm-{_digest(REQUIREMENTS.read_bytes(), version)}"
    python = folder / "bin" / "python"
    with _made_once(folder) as to_make:
        if to_make:
            _run(sys.executable, "-m", "venv", str(folder))
            _run(str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS))
            _run(str(python), "-m", "pip", "uninstall", "--quiet", "-y", *_UNUSED)
    return python


def model(size: str) -> Path:
    """The folder of a model of this size."""
    python = python_with_vllm()
    folder = cache_folder() / f"model-{size}-{_digest(MODEL_SCRIPT.read_bytes(), repr(SIZES[size]).encode())}"
    with _made_once(folder) as to_make:
        if to_make:
            _run(str(python), str(MODEL_SCRIPT), str(folder), *map(str, SIZES[size]))
    return folder


def plugin() -> Path:
    """A folder with our stat-logger plugin installed in it, for the PYTHONPATH of the servers that shall have it."""
    sources = [source.read_bytes() for source in sorted(PLUGIN.iterdir()) if source.is_file()]
    folder = cache_folder() / f"plugin-{_digest(*sources)}"
    with _made_once(folder) as to_make:
        if to_make:
            _run(
                str(python_with_vllm()),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                str(folder),
                str(PLUGIN),
            )
    return folder


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


SETTINGS = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    # two processes instead of three; no pinning, since two cores are shared by all
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    # else the first request with logprobs stalls for 20 s
    "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip


class Vllm:
    """One vLLM server in a process group of its own: killed alone, its engine core would live on."""

    def __init__(self, folder: Path, port: int, size: str, *options: str, **settings: str) -> None:
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.log = folder / f"vllm-{port}.log"
        self._sockets = tempfile.mkdtemp(prefix="vllm-")
        self._environment = {
            **unmeasured(), **SETTINGS,
            # what a first start learns of the model's class spares every other one an import of torch
            "VLLM_CACHE_ROOT": str(cache_folder() / "vllm-cache"),
            # a socket's path has 107 characters, and a test's folder may use them up
            "VLLM_RPC_BASE_PATH": self._sockets, **settings,
        }  # fmt: skip
        self._command = [
            str(python_with_vllm()), "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(model(size)),
            "--host", "127.0.0.1", "--port", str(port), "--served-model-name", size, "--max-model-len", "8192",
            # bfloat16 crashes with SIGILL on machines whose AMX nobody asked permission for
            "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--enable-prefix-caching",
            "--enable-prompt-tokens-details", *options,
        ]  # fmt: skip
        if "--kv-cache-memory-bytes" not in options:
            self._command += ["--kv-cache-memory-bytes", "64M"]
        self.start()

    def set(self, name: str, value: str) -> None:
        """A variable of its environment, from its next start on."""
        self._environment[name] = value

    def start(self) -> None:
        """Start (again) on the same port."""
        self.leaving = False
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Until it lists its model."""
        eventually(self._lists_its_model, f"vLLM {self.address} answers", pause_s=0.2, within_s=START_GUARD_S)

    def _lists_its_model(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"vLLM ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
        return self.get("/v1/models").status_code == 200

    def get(self, path: str) -> httpx.Response:
        """Ask it directly."""
        return httpx.get(f"http://{self.address}{path}", timeout=HANG_GUARD_S)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Ask it directly."""
        return httpx.post(f"http://{self.address}{path}", json=body, timeout=HANG_GUARD_S)

    def metric(self, name: str) -> float:
        """The sum of one family."""
        lines = [line.rpartition(" ") for line in self.get("/metrics").text.splitlines() if line.startswith(name)]
        return sum(float(value) for sample, _, value in lines if sample.partition("{")[0] == name)

    def send(self, what: signal.Signals) -> None:
        """A signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, what)

    def terminate(self) -> None:
        """SIGTERM to the server alone, as an orchestrator would send it."""
        self.leaving = True
        self.process.terminate()

    def kill(self) -> None:
        """SIGKILL to the group, as a lost node would look."""
        self.send(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it, whatever state it is in, at once."""
        self.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)
