"""Which NVML device is this worker's GPU, and what does NVML say about it.

NVML numbers GPUs by PCI bus, CUDA by speed unless told otherwise, and `CUDA_VISIBLE_DEVICES`
renumbers what CUDA sees. So an index is used only where it can mean one thing:

1. `NvmlBoard.open`: nvmlInit, then `find_target` picks the device: a MIG name in
   `CUDA_VISIBLE_DEVICES`, else the UUID or PCI bus id that CUDA reports, else a GPU name, else an
   index under CUDA_DEVICE_ORDER=PCI_BUS_ID or on a machine with one GPU.
2. `read`, once a second: one `BoardFigures`. What the driver does not support is None.
3. `close`, then `open` again after NVML was lost.

Torch-free. The `pynvml` module (package nvidia-ml-py) is the seam: everything takes it as an
argument, so a plain class with the same function names can stand in for it.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

log = logging.getLogger(__name__)

INDEX = re.compile(r"\d+")
LEGACY_MIG = re.compile(r"MIG-(GPU-[0-9a-f-]+)/(\d+)/(\d+)", re.IGNORECASE)
"""Name before driver 470: the parent's UUID, GPU instance id, compute instance id."""

MAX_EVENTS_PER_READ = 64
NO_INSTANCE = 0xFFFFFFFF
"""`gpuInstanceId` of an event that concerns the whole GPU."""


class NvmlUnavailable(Exception):
    """NVML cannot be used here; says why."""


class NoSuchDevice(Exception):
    """NVML works, but which of its devices is meant cannot be told; says why."""


class GpuGone(Exception):
    """The GPU fell off the bus or needs a reset; no process gets it back without one."""


def load_pynvml() -> Any:
    """The `pynvml` module; `NvmlUnavailable` where nvidia-ml-py is not installed.

    Imported only here, since a worker without GPU need not have it.
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlUnavailable(f"the package nvidia-ml-py is missing ({error})") from error


@dataclass(frozen=True)
class CudaId:
    """What CUDA itself says about the device; either may be empty."""

    uuid: str = ""
    """With or without the prefix `GPU-` or `MIG-`."""
    pci_bus_id: str = ""
    """`domain:bus:device.function`, hexadecimal."""


@dataclass(frozen=True)
class Target:
    """Handles of one CUDA device."""

    board: Any
    """The physical GPU: clocks, ECC and events are known only for it."""
    memory: Any | None
    """Whose memory counts: the board, or the MIG slice. None: a slice, but which is unknown."""
    name: str
    gpu_instance: int | None = None


def visible_tokens(visible: str | None) -> list[str] | None:
    """`CUDA_VISIBLE_DEVICES` as CUDA reads it; None: unset, so every GPU is visible.

    Entries count up to the first that is neither an index nor a GPU- or MIG- name ("", "-1",
    "NoDevFiles" and "void" therefore hide every GPU), and a repeated entry hides all
    (CUDA Programming Guide, environment variables).
    """
    if visible is None:
        return None
    tokens: list[str] = []
    for token in (part.strip() for part in visible.split(",")):
        if not INDEX.fullmatch(token) and not token.upper().startswith(("GPU-", "MIG-")):
            break
        if token in tokens:
            return []
        tokens.append(token)
    return tokens


def find_target(
    nvml: Any, ordinal: int, visible: str | None, cuda: CudaId, device_order: str
) -> Target:
    """The NVML handles of `cuda:<ordinal>`. `NoSuchDevice` rather than a guess.

    `device_order` is the value of CUDA_DEVICE_ORDER ("" when unset).
    """
    boards = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    tokens = visible_tokens(visible)
    token = str(ordinal) if tokens is None else "".join(tokens[ordinal : ordinal + 1])
    if token.upper().startswith("MIG-"):
        return _mig_target(nvml, boards, token)
    if cuda.uuid or cuda.pci_bus_id:
        return _cuda_target(nvml, boards, cuda)
    if not token:
        raise NoSuchDevice(f"CUDA_VISIBLE_DEVICES={visible!r} shows no cuda:{ordinal}")
    if token.upper().startswith("GPU-"):
        return _whole(nvml, _by_prefix(nvml, boards, token))
    if device_order != "PCI_BUS_ID" and len(boards) > 1:
        raise NoSuchDevice(
            f"index {token} is ambiguous among {len(boards)} GPUs: CUDA and NVML number them "
            "differently unless CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    if int(token) >= len(boards):
        raise NoSuchDevice(f"NVML shows {len(boards)} GPUs, index {token} is not among them")
    return _whole(nvml, boards[int(token)])


def _cuda_target(nvml: Any, boards: Sequence[Any], cuda: CudaId) -> Target:
    wanted = cuda.uuid.lower().removeprefix("gpu-").removeprefix("mig-")
    for board in boards if wanted else ():
        if _uuid(nvml, board).lower() == f"gpu-{wanted}":
            return _whole(nvml, board)
        for slice_ in _slices(nvml, board):
            if _uuid(nvml, slice_).lower() == f"mig-{wanted}":
                return _slice_target(nvml, board, slice_)
    if cuda.pci_bus_id:
        return _whole(nvml, nvml.nvmlDeviceGetHandleByPciBusId(cuda.pci_bus_id))
    raise NoSuchDevice(f"no NVML device has the UUID {cuda.uuid} that CUDA reports")


def _whole(nvml: Any, board: Any) -> Target:
    """A GPU not named by slice. In MIG mode CUDA runs on one slice of it, so that the board's
    memory is not ours."""
    mode = optional(nvml, nvml.nvmlDeviceGetMigMode, board)
    is_split = mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE
    return Target(board, None if is_split else board, _uuid(nvml, board))


def _mig_target(nvml: Any, boards: Sequence[Any], token: str) -> Target:
    legacy = LEGACY_MIG.fullmatch(token)
    found = []
    for board in boards:
        for slice_ in _slices(nvml, board):
            if legacy:
                ids = (_instance(nvml, slice_), nvml.nvmlDeviceGetComputeInstanceId(slice_))
                is_match = ids == (int(legacy[2]), int(legacy[3])) and (
                    _uuid(nvml, board).lower() == legacy[1].lower()
                )
            else:
                is_match = _uuid(nvml, slice_).lower().startswith(token.lower())
            if is_match:
                found.append(_slice_target(nvml, board, slice_))
    if len(found) != 1:
        raise NoSuchDevice(f"{len(found)} MIG devices match {token}, expected one")
    return found[0]


def _slice_target(nvml: Any, board: Any, slice_: Any) -> Target:
    return Target(board, slice_, _uuid(nvml, slice_), _instance(nvml, slice_))


def _by_prefix(nvml: Any, boards: Sequence[Any], token: str) -> Any:
    found = [b for b in boards if _uuid(nvml, b).lower().startswith(token.lower())]
    if len(found) != 1:
        raise NoSuchDevice(f"{len(found)} GPUs match {token}, expected one")
    return found[0]


def _slices(nvml: Any, board: Any) -> Iterator[Any]:
    for index in range(optional(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, board) or 0):
        slice_ = optional(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, board, index)
        if slice_ is not None:
            yield slice_


def _uuid(nvml: Any, handle: Any) -> str:
    return str(nvml.nvmlDeviceGetUUID(handle))


def _instance(nvml: Any, slice_: Any) -> int:
    return int(nvml.nvmlDeviceGetGpuInstanceId(slice_))


def optional(nvml: Any, query: Any, *arguments: Any) -> Any | None:
    """The answer, or None where this device, driver or container does not support the query."""
    try:
        return query(*arguments)
    except nvml.NVMLError as error:
        unsupported = (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
            nvml.NVML_ERROR_NOT_FOUND,
            nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        )
        if error.value in unsupported:
            return None
        raise


@dataclass(frozen=True)
class BoardFigures:
    """One reading. None: this device does not tell."""

    free_bytes: int | None = None
    total_bytes: int | None = None
    own_bytes: int | None = None
    """Device memory of this process. None in containers with a PID namespace of their own."""
    throttle_reasons: int | None = None
    """NVML's nvmlClocksEventReasons bits."""
    ecc_uncorrected: int | None = None
    """Since the driver was loaded."""
    retired_pages_pending: bool | None = None
    rows_pending: bool | None = None
    """Row remapping waits for a reset; the bad rows are already out of use."""
    rows_failed: bool | None = None
    xids: tuple[int, ...] | None = None
    """XID errors since the last reading."""


class NvmlBoard:
    """An open NVML with this worker's device. One thread at a time."""

    def __init__(self, nvml: Any, target: Target) -> None:
        self.target = target
        self._nvml = nvml
        self._events = self._subscribe()

    @classmethod
    def open(cls, nvml: Any, ordinal: int, visible: str | None, cuda: CudaId) -> Self:
        """`NvmlUnavailable` or `NoSuchDevice` with the reason; NVML is then closed again."""
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise NvmlUnavailable(f"NVML does not start: {error}") from error
        try:
            order = os.environ.get("CUDA_DEVICE_ORDER", "")
            return cls(nvml, find_target(nvml, ordinal, visible, cuda, order))
        except BaseException as error:
            shut_down(nvml)
            if isinstance(error, nvml.NVMLError):
                raise NvmlUnavailable(f"NVML does not show the device: {error}") from error
            raise

    def close(self) -> None:
        """Also when NVML is lost; whatever it refuses then is only worth a debug line."""
        if self._events is not None:
            try:
                self._nvml.nvmlEventSetFree(self._events)
            except self._nvml.NVMLError as error:
                log.debug("nvmlEventSetFree: %s", error)
            self._events = None
        shut_down(self._nvml)

    def read(self) -> BoardFigures:
        """`NVMLError` when NVML is lost, `GpuGone` when the GPU is."""
        nvml = self._nvml
        try:
            return self._read()
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise GpuGone(str(error)) from error
            raise

    def _read(self) -> BoardFigures:
        nvml, board = self._nvml, self.target.board
        free, total = self._memory()
        rows = optional(nvml, nvml.nvmlDeviceGetRemappedRows, board)
        retired = optional(nvml, nvml.nvmlDeviceGetRetiredPagesPendingStatus, board)
        return BoardFigures(
            free_bytes=free,
            total_bytes=total,
            own_bytes=self._own(),
            throttle_reasons=self._throttle_reasons(),
            ecc_uncorrected=optional(
                nvml,
                nvml.nvmlDeviceGetTotalEccErrors,
                board,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            retired_pages_pending=None if retired is None else bool(retired),
            rows_pending=None if rows is None else bool(rows[2]),
            rows_failed=None if rows is None else bool(rows[3]),
            xids=self._new_xids(),
        )

    def _memory(self) -> tuple[int, int] | tuple[None, None]:
        """(free, total). Drivers without the v2 query, or that answer 0, are asked for v1."""
        nvml, handle = self._nvml, self.target.memory
        if handle is not None:
            for version in ((nvml.nvmlMemory_v2,), ()):
                info = optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, *version)
                if info is not None and info.total > 0:
                    return int(info.free), int(info.total)
        return None, None

    def _own(self) -> int | None:
        nvml, handle = self._nvml, self.target.memory
        if handle is None:
            return None
        processes = optional(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        mine = [p.usedGpuMemory for p in processes or () if p.pid == os.getpid()]
        return sum(mine) if mine and None not in mine else None

    def _throttle_reasons(self) -> int | None:
        nvml = self._nvml
        for query in (  # the first is the newer name of the second, driver 535
            nvml.nvmlDeviceGetCurrentClocksEventReasons,
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons,
        ):
            reasons = optional(nvml, query, self.target.board)
            if reasons is not None:
                return int(reasons)
        return None

    def _subscribe(self) -> Any | None:
        nvml = self._nvml
        events = optional(nvml, nvml.nvmlEventSetCreate)
        if events is None:
            return None
        try:
            nvml.nvmlDeviceRegisterEvents(
                self.target.board, nvml.nvmlEventTypeXidCriticalError, events
            )
        except nvml.NVMLError:
            # XIDs are an extra; not to have them is no reason to do without the other figures.
            optional(nvml, nvml.nvmlEventSetFree, events)
            return None
        return events

    def _new_xids(self) -> tuple[int, ...] | None:
        nvml, xids = self._nvml, []
        if self._events is None:
            return None
        for _ in range(MAX_EVENTS_PER_READ):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_TIMEOUT:
                    break
                raise
            mine = self.target.gpu_instance
            if mine is None or event.gpuInstanceId in (mine, NO_INSTANCE):
                xids.append(int(event.eventData))
        return tuple(xids)


def shut_down(nvml: Any) -> None:
    """nvmlShutdown. A broken NVML refuses that too, and has then nothing that we could free."""
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        log.debug("nvmlShutdown: %s", error)
