"""The monitor over a small fake NVML: sources, errors, NVML missing or lost."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from pageferry.kvtransfer import device_health
from pageferry.kvtransfer.device_health import (
    Cuda,
    HealthMonitor,
    Memory,
)
from pageferry.kvtransfer.nvml_devices import (
    CudaId,
)

MIB, GIB = 1 << 20, 1 << 30
GPU_A, GPU_B = "GPU-aaaa1111-0000", "GPU-aaaa2222-0000"
MIG_A0, MIG_A1 = "MIG-cccc0000-0000", "MIG-cccc1111-0000"


@dataclass(eq=False)
class Device:
    """A GPU or a MIG slice. Attributes set to an error code make their query fail with it."""

    uuid: str
    total: Any = 80 * GIB
    free: int = 40 * GIB
    own: int | None = None
    """Use of this process; None: a container that does not see its own pid."""
    reasons: Any = 0
    ecc: Any = 0
    retired: Any = 0
    rows: Any = (0, 0, 0, 0)
    slices: list[Device] = field(default_factory=list)
    instance: int = 0


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"fake NVML error {value}")
        self.value = value


def answer(value: Any) -> Any:
    if isinstance(value, NVMLError):
        raise value
    return value


class FakeNvml:
    """The functions of pynvml that we use, over a list of `Device`."""

    NVMLError = NVMLError
    NVML_ERROR_UNINITIALIZED = 1
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25
    NVML_ERROR_UNKNOWN = 999
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlMemory_v2 = 0x02000028
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *devices: Device) -> None:
        self._devices = devices
        self._xids: list[Any] = []
        self._failure: int | None = None
        """Error code of every call from now on."""
        self._memory_errors: dict[int | None, int] = {}
        """Version of the memory query -> error code."""
        self._num_inits = 0
        self._events_supported = True

    def nvmlInit(self) -> None:
        self._check()
        self._num_inits += 1

    def nvmlShutdown(self) -> None:
        self._check()

    def nvmlDeviceGetCount(self) -> int:
        return len(self._check())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        return self._check()[index]

    def nvmlDeviceGetUUID(self, handle: Device) -> str:
        self._check()
        return handle.uuid

    def nvmlDeviceGetMigMode(self, device: Device) -> list[int]:
        self._check()
        return [int(bool(device.slices))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Device) -> int:
        self._check()
        return 7 if device.slices else answer(NVMLError(self.NVML_ERROR_NOT_SUPPORTED))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, index: int) -> Device:
        if index >= len(device.slices):
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        return device.slices[index]

    def nvmlDeviceGetGpuInstanceId(self, device: Device) -> int:
        return device.instance

    def nvmlDeviceGetMemoryInfo(self, handle: Device, version: int | None = None) -> Any:
        self._check()
        if version in self._memory_errors:
            raise NVMLError(self._memory_errors[version])
        return SimpleNamespace(total=handle.total, free=handle.free)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Device) -> list[Any]:
        self._check()
        mine = [] if handle.own is None else [(os.getpid(), handle.own)]
        return [SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in [(1, GIB), *mine]]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Device) -> int:
        raise NVMLError(self.NVML_ERROR_FUNCTION_NOT_FOUND)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Device) -> int:
        self._check()
        return int(answer(handle.reasons))

    def nvmlDeviceGetTotalEccErrors(self, handle: Device, errorType: int, counterType: int) -> int:
        assert (errorType, counterType) == (1, 0)
        return int(answer(handle.ecc))

    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: Device) -> int:
        return int(answer(device.retired))

    def nvmlDeviceGetRemappedRows(self, device: Device) -> tuple[int, ...]:
        return tuple(answer(device.rows))

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: Device, eventTypes: int, eventSet: str) -> None:
        if not self._events_supported:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlEventSetWait_v2(self, eventSet: str, timeoutms: int) -> Any:
        assert timeoutms == 0
        self._check()
        if not self._xids:
            raise NVMLError(self.NVML_ERROR_TIMEOUT)
        return self._xids.pop(0)

    def nvmlEventSetFree(self, eventSet: str) -> None:
        self._check()

    def _check(self) -> tuple[Device, ...]:
        if self._failure is not None:
            raise NVMLError(self._failure)
        return self._devices

    # for tests

    def xid(self, number: int, instance: int = 0xFFFFFFFF) -> None:
        self._xids.append(SimpleNamespace(eventData=number, gpuInstanceId=instance))

    def fail(self, code: int | None) -> None:
        self._failure = code

    def refuse_memory(self, **versions: int) -> None:
        numbers = {"v1": None, "v2": self.nvmlMemory_v2}
        self._memory_errors = {numbers[v]: code for v, code in versions.items()}


def host(free: int = 8 * GIB, total: int = 16 * GIB, source: str = "host") -> Memory:
    return Memory(free, total, source)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def monitor(nvml: FakeNvml, visible: str = "0", **more: Any) -> HealthMonitor:
    return HealthMonitor.create("cuda:0", visible, nvml=nvml, **{"read_host": host, **more})


def test_the_fake_has_only_what_pynvml_has() -> None:
    for name, ours in vars(FakeNvml).items():
        if name.lower().startswith("nvml"):
            real = getattr(pynvml, name)
            if isinstance(ours, int):
                assert ours == real, name
            elif inspect.isfunction(ours):
                parameters = list(inspect.signature(real).parameters)
                assert list(inspect.signature(ours).parameters)[1:] == parameters, name


def tree(*, is_mig: bool = True) -> FakeNvml:
    a = Device(GPU_A, total=80 * GIB)
    b = Device(GPU_B, total=24 * GIB)
    if is_mig:
        a.slices = [
            Device(MIG_A0, total=20 * GIB, free=10 * GIB, instance=3),
            Device(MIG_A1, total=10 * GIB, free=5 * GIB, instance=5),
        ]
    return FakeNvml(a, b)


def test_totals_are_those_of_the_slice_and_never_of_its_parent() -> None:
    assert monitor(tree(), MIG_A0).last.total_bytes == 20 * GIB
    unnamed = monitor(tree(), GPU_A, cuda=Cuda(mem_get_info=lambda: (GIB, 20 * GIB)))
    assert (unnamed.source, unnamed.last.total_bytes) == ("cuda", 20 * GIB)


def test_two_gpus_remapped() -> None:
    nvml = tree(is_mig=False)
    for gpu, total in ((GPU_A, 80 * GIB), (GPU_B, 24 * GIB)):
        assert monitor(nvml, "3,1", cuda=Cuda(CudaId(uuid=gpu))).last.total_bytes == total


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refused", "total", "has_cuda", "source", "free"),
    [
        ({}, 80 * GIB, True, "nvml", 40 * GIB),
        ({"v1": 3}, 80 * GIB, True, "nvml", 40 * GIB),
        ({"v2": 3}, 80 * GIB, True, "nvml", 40 * GIB),
        ({"v2": 13}, 80 * GIB, True, "nvml", 40 * GIB),
        ({"v2": 3, "v1": 3}, 80 * GIB, True, "cuda", 7 * GIB),
        ({"v2": 4, "v1": 2}, 80 * GIB, True, "cuda", 7 * GIB),
        ({}, 0, True, "cuda", 7 * GIB),
        ({"v2": 3, "v1": 3}, 80 * GIB, False, "host", 8 * GIB),
    ],
)
def test_memory_falls_back(
    refused: dict[str, int], total: int, has_cuda: bool, source: str, free: int
) -> None:
    nvml = FakeNvml(Device(GPU_A, total=total))
    nvml.refuse_memory(**refused)
    cuda = Cuda(mem_get_info=(lambda: (7 * GIB, 9 * GIB)) if has_cuda else None)
    worker = monitor(nvml, cuda=cuda)
    health = worker.poll()
    assert (worker.source, health.free_bytes, health.verdict) == (source, free, "ok")
    assert health.figures["nvml_available"] == 1


def test_a_cuda_that_answers_zero_does_not_know_either() -> None:
    worker = monitor(FakeNvml(Device(GPU_A, total=0)), cuda=Cuda(mem_get_info=lambda: (0, 0)))
    assert worker.source == "host"


def broken() -> Any:
    raise RuntimeError("CUDA error: unspecified launch failure")


def test_unknown_memory_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml(Device(GPU_A, total=0))
    worker = monitor(nvml, cuda=Cuda(mem_get_info=broken, own_bytes=broken), read_host=broken)
    for _ in range(3):
        health = worker.poll()
    assert (health.verdict, health.free_bytes, health.total_bytes) == ("ok", None, None)
    assert worker.source == ""
    assert not {"memory_used_bytes", "memory_total_bytes"} & health.figures.keys()
    assert len(caplog.records) == 3, "one warning per source that fails"


def test_own_use_comes_from_nvml_or_from_cuda() -> None:
    for own, expected in ((30 * GIB, "nvml"), (None, "cuda")):
        gpu = Device(GPU_A, own=own)
        worker = monitor(FakeNvml(gpu), cuda=Cuda(own_bytes=lambda: 25 * GIB))
        assert worker.last.history.yardstick == f"nvml/{expected}"
        gpu.free -= 39 * GIB + 512 * MIB
        assert worker.poll().verdict == "stop"


# --- errors and clocks -------------------------------------------------------------------------

UNSUPPORTED = NVMLError(FakeNvml.NVML_ERROR_NOT_SUPPORTED)


def test_board_figures_are_read_or_unknown() -> None:
    gpu = Device(GPU_A, ecc=7, reasons=0x8, rows=(0, 1, 1, 0))
    worker = monitor(FakeNvml(gpu))
    assert worker.last.verdict == "reduced"
    gpu.ecc = 8
    assert worker.poll().verdict == "unhealthy"
    silent = Device(GPU_A, ecc=UNSUPPORTED, reasons=UNSUPPORTED)
    silent.retired = silent.rows = UNSUPPORTED
    health = monitor(FakeNvml(silent)).poll()
    assert (health.verdict, health.figures["nvml_available"]) == ("ok", 1)
    assert not {"device_throttle_reasons", "device_ecc_uncorrected_errors"} & health.figures.keys()
    for broken in ({"retired": 1}, {"rows": (0, 0, 0, 1)}):
        assert monitor(FakeNvml(Device(GPU_A, **broken))).last.verdict == "unhealthy"


@pytest.mark.parametrize(
    ("xids", "verdict"),
    [([], "ok"), ([13, 31, 43, 45], "ok"), ([79], "unhealthy"), ([31, 48, 48], "unhealthy")],
)
def test_xids(xids: list[int], verdict: str) -> None:
    nvml = FakeNvml(Device(GPU_A))
    worker = monitor(nvml)
    for number in xids:
        nvml.xid(number)
    worker.poll()
    health = worker.poll()
    assert (health.verdict, health.figures["device_xid_errors"]) == (verdict, len(xids))


def test_xids_of_other_slices_are_not_ours() -> None:
    nvml = tree()
    worker = monitor(nvml, MIG_A0)
    nvml.xid(94, instance=5)
    assert worker.poll().verdict == "ok"
    nvml.xid(94, instance=3)
    assert worker.poll().verdict == "unhealthy"


def test_no_event_support_costs_only_the_xids() -> None:
    nvml = FakeNvml(Device(GPU_A, reasons=0x8))
    nvml._events_supported = False
    nvml.xid(79)
    health = monitor(nvml).poll()
    assert health.verdict == "reduced"
    assert "device_xid_errors" not in health.figures


# --- no NVML, NVML lost ------------------------------------------------------------------------


@pytest.mark.parametrize(("has_cuda", "source"), [(True, "cuda"), (False, "host")])
def test_no_nvml_is_one_warning(
    caplog: pytest.LogCaptureFixture, has_cuda: bool, source: str
) -> None:
    nvml = FakeNvml()
    nvml.fail(nvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    cuda = Cuda(mem_get_info=(lambda: (GIB, 9 * GIB)) if has_cuda else None)
    worker = monitor(nvml, cuda=cuda)
    for _ in range(20):
        health = worker.poll()
    assert (health.verdict, worker.source) == ("ok", source)
    assert health.figures["nvml_available"] == 0
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "fake NVML error 12" in caplog.text


def test_nvml_lost_and_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock, gpu = Clock(), Device(GPU_A, reasons=0x8, own=0)
    nvml = FakeNvml(gpu)
    worker = monitor(nvml, clock=clock)
    assert worker.last.verdict == "reduced"
    nvml.fail(nvml.NVML_ERROR_UNKNOWN)
    inits = nvml._num_inits
    seen = []
    for _ in range(30):
        clock.now += 1
        seen.append(worker.poll())
    assert [h.verdict for h in seen] == ["reduced"] * 10 + ["ok"] * 20
    assert [h.age_s for h in seen] == list(range(1, 31))
    assert "only the page pool decides" in seen[-1].reason
    assert seen[-1].free_bytes == 40 * GIB
    assert seen[-1].figures["nvml_available"] == 0
    assert sum(r.levelno >= logging.WARNING for r in caplog.records) == 1
    nvml.fail(None)
    gpu.free = 39 * GIB
    clock.now += 60
    back = worker.poll()
    assert (back.verdict, back.age_s, back.free_bytes) == ("reduced", 0, 39 * GIB)
    assert nvml._num_inits == inits + 1
    assert "NVML is back" in caplog.text


def test_xids_are_counted_once() -> None:
    nvml = FakeNvml(Device(GPU_A))
    worker = monitor(nvml)
    nvml.xid(31)
    worker.poll()
    nvml.fail(nvml.NVML_ERROR_UNKNOWN)
    for _ in range(3):
        assert worker.poll().figures["device_xid_errors"] == 1


def test_reopening_pauses_grow() -> None:
    clock, nvml = Clock(), FakeNvml(Device(GPU_A))
    worker = monitor(nvml, clock=clock)
    tries: list[float] = []
    nvml.fail(nvml.NVML_ERROR_UNKNOWN)
    real_init: Callable[[], None] = nvml.nvmlInit

    def init() -> None:
        tries.append(clock.now)
        real_init()

    nvml.nvmlInit = init  # type: ignore[method-assign]
    for _ in range(300):
        clock.now += 1
        worker.poll()
    pauses = [b - a for a, b in itertools.pairwise(tries)]
    assert pauses[:5] == [2, 4, 8, 16, 32]
    assert set(pauses[5:]) == {device_health.MAX_PAUSE_S}
    nvml.fail(None)
    clock.now += 60
    assert worker.poll().age_s == 0
    nvml.fail(nvml.NVML_ERROR_UNKNOWN)
    tries.clear()
    for _ in range(4):
        clock.now += 1
        worker.poll()
    assert len(tries) == 2, "after 1 and after 2 more seconds"


def test_memory_that_does_not_come_from_nvml_stays_watched() -> None:
    clock, nvml = Clock(), FakeNvml(Device(GPU_A, total=0))
    left = [8 * GIB]
    worker = monitor(nvml, clock=clock, read_host=lambda: host(left[0]))
    nvml.fail(nvml.NVML_ERROR_UNKNOWN)
    left[0] = 100 * MIB
    clock.now += 100
    assert worker.poll().verdict == "stop"


@pytest.mark.parametrize("code", [FakeNvml.NVML_ERROR_GPU_IS_LOST, 16])
def test_a_gpu_that_is_gone_is_unhealthy_for_good(code: int) -> None:
    nvml = FakeNvml(Device(GPU_A))
    worker = monitor(nvml)
    nvml.fail(code)
    assert worker.poll().verdict == "unhealthy"
    nvml.fail(None)
    assert worker.poll().verdict == "unhealthy"
