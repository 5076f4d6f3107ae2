"""Free memory of the host: the least of what the machine and the control groups leave."""

import os

import pytest

from residency.runtime.free_memory import SYSTEM_SHARE, Room, free_host_bytes

MACHINE = 64 << 30


@pytest.fixture
def root(tmp_path):
    write(tmp_path, "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {MACHINE // 1024} kB")
    return tmp_path


def write(root, name, text):
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def group_v2(root, path, limit, used, files=0):
    folder = f"sys/fs/cgroup/{path}".rstrip("/")
    write(root, f"{folder}/memory.max", limit)
    write(root, f"{folder}/memory.current", used)
    stat = f"anon 5\ninactive_file {files // 2}\nactive_file {files - files // 2}"
    write(root, f"{folder}/memory.stat", stat)


def test_the_machine_s_where_there_is_no_group(root):
    assert free_host_bytes(root) == MACHINE


def test_physical_memory_where_the_system_is_silent(tmp_path):
    expected = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free_host_bytes(tmp_path) == expected


@pytest.mark.parametrize("own", ["/", "/pod/box", "/not/there"])
def test_a_container_s_limit_v2(root, own):
    """The root of what it sees, wherever it is told to be; what files keep in memory gives way."""
    write(root, "proc/self/cgroup", f"0::{own}")
    group_v2(root, "", 8 << 30, 3 << 30, files=1 << 30)
    assert free_host_bytes(root) == 6 << 30


def test_the_tightest_of_groups_within_groups(root):
    write(root, "proc/self/cgroup", "0::/pod/box")
    group_v2(root, "pod/box", "max", 1 << 30)
    group_v2(root, "pod", 4 << 30, 1 << 30)
    assert free_host_bytes(root) == 3 << 30


def test_v1(root):
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/a\n3:memory:/docker/abc\n1:name=systemd:/")
    for folder, limit in (("docker/abc", 6 << 30), ("", (1 << 63) - 4096)):
        base = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
        write(root, f"{base}/memory.limit_in_bytes", limit)
        write(root, f"{base}/memory.usage_in_bytes", 2 << 30)
        stat = f"inactive_file 7\ntotal_inactive_file {1 << 29}\ntotal_active_file {1 << 29}"
        write(root, f"{base}/memory.stat", stat)
    assert free_host_bytes(root) == 5 << 30


def test_a_group_over_its_limit_has_nothing_left(root):
    write(root, "proc/self/cgroup", "0::/")
    group_v2(root, "", 1 << 30, 2 << 30)
    assert free_host_bytes(root) == 0


@pytest.mark.parametrize("text", ["", "0", "0:", "::", "no groups here", "0::/\n\n"])
def test_what_cannot_be_read_limits_nothing(root, text):
    write(root, "proc/self/cgroup", text)
    assert free_host_bytes(root) == MACHINE


def test_the_system_keeps_a_part_of_what_banks_leave_free():
    assert Room(80).beside_system(0) == Room(80 - 80 // SYSTEM_SHARE)
    assert Room(80).beside_system(16) == Room(80 - 64 // SYSTEM_SHARE)
    assert Room(80).beside_system(90) == Room(80)
    assert Room(80, 40).beside_system(16) == Room(80, 40)
