"""What every test gets: a leak check on threads and file descriptors, a tmpfs and a disk directory, profiles."""

import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("headwater.testing.stores")  # what it found there is said

from headwater.metrics import Metrics  # noqa: E402
from machines.processes import Helper  # noqa: E402

# One thread for torch, here and in every process that a test starts: sums are split among threads, so another number of
# them is other bits, and tests compare bits. More would only wait for each other on tiny tensors. Said before torch is
# loaded.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"

# Triton looks when it is imported, and somebody else may import it first: without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_MOMENT_S = 10.0
# Told to end when a loop or a router ends, which does not wait for that.
_ENDING = ("AnyIO worker thread", "headwater router")

Metrics.strict = True  # a name nobody declared fails the test that counts it

settings.register_profile(
    "default", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("nightly", parent=settings.get_profile("default"), max_examples=1000, stateful_step_count=100)
settings.load_profile(os.environ.get("HEADWATER_TEST_PROFILE", "default"))


_num_modules = 0


def _collect() -> None:
    """Collect; and take what new imports made out of the collector's sight, or it looks through it after every test."""
    global _num_modules
    gc.collect()
    if len(sys.modules) > _num_modules:
        _num_modules = len(sys.modules)
        gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin with nothing to look through."""
    _collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].zeros(1, device="cuda").cpu()  # a CUDA context opens files of its own; not a test's leak


def _open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if not target.startswith(("/dev/null", "/dev/urandom", "anon_inode", "/dev/nvidia")) and "/fd" not in target:
            found[fd] = target
    return found


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread running or a file open."""
    threads = set(threading.enumerate())
    files = _open_files()
    yield
    _collect()
    for thread in set(threading.enumerate()) - threads:
        if thread.name.startswith(_ENDING):
            thread.join(_MOMENT_S)
    left = [thread.name for thread in threading.enumerate() if thread not in threads and thread.is_alive()]
    assert not left, f"threads left running: {left}"
    opened = {fd: target for fd, target in _open_files().items() if files.get(fd) != target}
    until_s = time.monotonic() + _MOMENT_S
    while opened and time.monotonic() < until_s:  # a thread of a fixture that goes on may be just reading one
        time.sleep(0.01)
        opened = dict(opened.items() & _open_files().items())
    assert not opened, f"files left open: {opened}"


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory on tmpfs."""
    path = Path(tempfile.mkdtemp(prefix="headwater-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=["tmpfs", "disk"])
def place(request: pytest.FixtureRequest, shm: Path, tmp_path: Path) -> Path:
    """Both media."""
    return shm if request.param == "tmpfs" else tmp_path


@pytest.fixture
def helper() -> Iterator[Callable[[], Helper]]:
    """Starts other processes, and ends them."""
    started: list[Helper] = []

    def start() -> Helper:
        started.append(Helper())
        return started[-1]

    yield start
    for one in started:
        one.kill()
