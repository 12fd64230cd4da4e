"""Which NVML device `cuda:N` is, over a small fake tree of GPUs and MIG slices."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import pynvml
import pytest

from pageferry.kvtransfer.nvml_devices import CudaId, NoSuchDevice, find_target, visible_tokens

GPU_A, GPU_B = "GPU-aaaa1111-0000", "GPU-aaaa2222-0000"
MIG_A0, MIG_A1 = "MIG-cccc0000-0000", "MIG-cccc1111-0000"


@dataclass(eq=False)
class Device:
    """A GPU, or a MIG slice with the id of its GPU instance."""

    uuid: str
    bus: str = ""
    slices: list[Device] = field(default_factory=list)
    instance: int = 0


class FakeNvml:
    """The functions of pynvml that find devices."""

    NVMLError = pynvml.NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, *devices: Device) -> None:
        self._devices = devices

    def nvmlDeviceGetCount(self) -> int:
        return len(self._devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        return self._devices[index]

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str) -> Device:
        return next(d for d in self._devices if d.bus == pciBusId)

    def nvmlDeviceGetUUID(self, handle: Device) -> str:
        return handle.uuid

    def nvmlDeviceGetMigMode(self, device: Device) -> list[int]:
        return [int(bool(device.slices))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Device) -> int:
        if not device.slices:
            raise pynvml.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, index: int) -> Device:
        if index >= len(device.slices):
            raise pynvml.NVMLError(self.NVML_ERROR_NOT_FOUND)
        return device.slices[index]

    def nvmlDeviceGetGpuInstanceId(self, device: Device) -> int:
        return device.instance

    def nvmlDeviceGetComputeInstanceId(self, device: Device) -> int:
        return 0


def test_the_fake_has_only_what_pynvml_has() -> None:
    for name, ours in vars(FakeNvml).items():
        if name.lower().startswith("nvml"):
            real = getattr(pynvml, name)
            if isinstance(ours, int):
                assert ours == real, name
            elif inspect.isfunction(ours):
                parameters = list(inspect.signature(real).parameters)
                assert list(inspect.signature(ours).parameters)[1:] == parameters, name


@pytest.mark.parametrize(
    ("visible", "tokens"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("void", []),
        ("3,1", ["3", "1"]),
        (" 0 , 1 ", ["0", "1"]),
        ("0,2,-1,1", ["0", "2"]),
        ("0,x,1", ["0"]),
        ("1,1", []),
        ("GPU-8932f937", ["GPU-8932f937"]),
        ("MIG-c6d4f1ef,0", ["MIG-c6d4f1ef", "0"]),
    ],
)
def test_visible_tokens(visible: str | None, tokens: list[str] | None) -> None:
    assert visible_tokens(visible) == tokens


def tree() -> FakeNvml:
    slices = [Device(MIG_A0, instance=3), Device(MIG_A1, instance=5)]
    return FakeNvml(Device(GPU_A, "0000:17:00.0", slices), Device(GPU_B, "0000:65:00.0"))


FOUND = [
    # visible, ordinal, what CUDA reports, CUDA_DEVICE_ORDER -> name
    (MIG_A1, 0, CudaId(), "", MIG_A1),
    (MIG_A1[:10].lower().replace("mig", "MIG"), 0, CudaId(), "", MIG_A1),
    (f"MIG-{GPU_A}/3/0", 0, CudaId(), "", MIG_A0),
    (MIG_A1, 0, CudaId(uuid=GPU_A), "", MIG_A1),
    (GPU_B, 0, CudaId(), "", GPU_B),
    (f"{GPU_A},{GPU_B[:10]}", 1, CudaId(), "", GPU_B),
    ("1", 0, CudaId(), "PCI_BUS_ID", GPU_B),
    (None, 1, CudaId(), "PCI_BUS_ID", GPU_B),
    # the order that CUDA chose is the reverse of NVML's: what CUDA reports decides
    ("0", 0, CudaId(uuid=GPU_B.removeprefix("GPU-")), "", GPU_B),
    (None, 0, CudaId(pci_bus_id="0000:65:00.0"), "", GPU_B),
    (None, 0, CudaId(uuid="unknown", pci_bus_id="0000:65:00.0"), "", GPU_B),
    (None, 0, CudaId(uuid=MIG_A0.removeprefix("MIG-")), "", MIG_A0),
]


@pytest.mark.parametrize(("visible", "ordinal", "cuda", "order", "name"), FOUND)
def test_the_device_is_found(
    visible: str | None, ordinal: int, cuda: CudaId, order: str, name: str
) -> None:
    target = find_target(tree(), ordinal, visible, cuda, order)
    assert target.name == name
    assert target.memory.uuid == name
    assert target.board.uuid == (GPU_A if name.startswith("MIG") else name)


@pytest.mark.parametrize(
    ("visible", "cuda", "reason"),
    [
        ("", CudaId(), "shows no cuda:0"),
        ("-1", CudaId(), "shows no cuda:0"),
        ("0", CudaId(), "ambiguous among 2 GPUs"),
        (None, CudaId(), "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        ("GPU-aaaa", CudaId(), "2 GPUs match GPU-aaaa"),
        ("GPU-ffff", CudaId(), "0 GPUs match"),
        ("MIG-cccc", CudaId(), "2 MIG devices match"),
        ("MIG-ffff", CudaId(uuid=GPU_B), "0 MIG devices match"),
        (None, CudaId(uuid="ffff"), "UUID ffff"),
    ],
)
def test_no_guess(visible: str | None, cuda: CudaId, reason: str) -> None:
    with pytest.raises(NoSuchDevice, match=reason):
        find_target(tree(), 0, visible, cuda, "")


def test_a_single_gpu_needs_no_order_and_a_missing_index_is_named() -> None:
    one = FakeNvml(Device(GPU_A))
    assert find_target(one, 0, "0", CudaId(), "").name == GPU_A
    with pytest.raises(NoSuchDevice, match="index 3"):
        find_target(one, 0, "3", CudaId(), "")
