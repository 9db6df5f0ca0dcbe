"""What `etude doctor` says of machines that are not this one: each fault is a sentence with its cure."""

from __future__ import annotations

import pytest

from etude.audit.machine import GpuFacts, device
from etude.sandbox.kernel import Host, cause, read_host, requirements


def faults(host: Host) -> list[str]:
    return [f"{check.name} is {check.detail}: {check.cure}" for check in requirements(host) if not check.ok]


@pytest.mark.parametrize(("host", "name", "cure"), [
    (Host("Darwin", "24.1.0", "arm64"), "Linux is Darwin", "macOS has no Linux namespaces: run etude on a Linux"),
    (Host("Windows", "11", "AMD64"), "Linux is Windows", "install WSL 2 and run etude there"),
    (Host(release="4.4.0-19041-Microsoft"), "kernel is 4.4", "`wsl --set-version DISTRIBUTION 2`"),
    (Host(release="5.10.102.1-microsoft-standard-WSL2"), "kernel is 5.10", "`wsl --update`"),
    (Host(release="5.4.0-generic"), "kernel is 5.4", "they need Linux 5.12 or later: update the kernel"),
    (Host(processor="riscv64"), "processor is riscv64", "use x86_64 or aarch64"),
    (Host(bash=False), "bash is /bin/bash", "install bash"),
    (Host(switches={"user/max_user_namespaces": "0"}), "max_user_namespaces is 0", "user.max_user_namespaces=10000"),
    (Host(switches={"kernel/unprivileged_userns_clone": "0"}), "unprivileged_userns_clone is 0", "userns_clone=1"),
    (Host(switches={"kernel/apparmor_restrict_unprivileged_userns": "1"}), "apparmor_restrict_unprivileged_userns is 1",
     "AppArmor keeps users from making namespaces"),
])  # fmt: skip
def test_a_fault_of_a_machine_names_its_cure(host: Host, name: str, cure: str) -> None:
    (fault,) = faults(host)
    assert fault.startswith(name)
    assert "no boxes" in fault
    assert cure in fault
    assert cause(host) == fault


@pytest.mark.parametrize("host", [
    Host(), Host(release="5.15.167.4-microsoft-standard-WSL2"), Host(container="docker"), Host(filtered=True),
    Host(release="6.1.0-13-amd64"), Host(release="7+"),
    Host(root=True, switches={"kernel/apparmor_restrict_unprivileged_userns": "1", "user/max_user_namespaces": "0"}),
    Host(switches={"kernel/apparmor_restrict_unprivileged_userns": "0", "user/max_user_namespaces": "9"}),
])  # fmt: skip
def test_what_does_not_hinder_is_no_fault(host: Host) -> None:
    assert faults(host) == []


@pytest.mark.parametrize(("host", "cure"), [
    (Host(container="docker", filtered=True), "--security-opt seccomp=unconfined"),
    (Host(filtered=True), "--cap-add SYS_ADMIN"),
    (Host(container="podman"), "--privileged"),
    (Host(), "run etude outside of it"),
])  # fmt: skip
def test_where_boxes_fail_for_no_known_reason_the_container_is_named(host: Host, cure: str) -> None:
    assert cure in cause(host)


def test_this_machine_has_what_boxes_need() -> None:
    assert faults(read_host()) == []


@pytest.mark.parametrize(("gpu", "detail", "cure"), [
    (GpuFacts(), "no GPU", "use a machine with an NVIDIA GPU"),
    (GpuFacts(driver=True), "a GPU, but no PyTorch", "see the extras"),
    (GpuFacts(driver=True, torch="2.13.0+cpu"), "PyTorch 2.13.0+cpu is a build for CPUs", "install the CUDA build"),
    (GpuFacts(driver=True, torch="2.13.0", built=True), "PyTorch 2.13.0 cannot use", "update the driver"),
    (GpuFacts(driver=True, torch="2.13.0", built=True, name="H100"), "H100", ""),
])  # fmt: skip
def test_the_device_is_told_and_never_needed(gpu: GpuFacts, detail: str, cure: str) -> None:
    check = device(gpu)
    assert (check.ok, check.needed) == (not cure, False)
    assert detail in check.detail
    assert cure in check.cure
