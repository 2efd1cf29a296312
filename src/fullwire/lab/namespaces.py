"""Namespaces of our own, entered with or without root, and removed by the kernel.

Python has `os.unshare` and `os.setns` since 3.12 only, and no `mount` or `prctl` at all, so these
four calls go to the C library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from fullwire.errors import UsageError

_NEW_MOUNTS = 0x00020000
_NEW_HOSTNAME = 0x04000000
_NEW_USER = 0x10000000
_NEW_PIDS = 0x20000000
_NEW_NETWORK = 0x40000000
_OWN = _NEW_NETWORK | _NEW_MOUNTS | _NEW_PIDS
_MOUNT_BIND, _MOUNT_PRIVATE_TREE = 0x1000, 0x4000 | 0x40000
_MOUNT_HARMLESS = 0x2 | 0x4 | 0x8  # nosuid, nodev, noexec: the usual options of /proc and /sys
_REMOUNT = 0x20
_MOST_TRIES = 1000
_DISK_BYTES = 2**30  # at most, and only as much memory as it holds
_SIGNAL_AT_PARENTS_DEATH = 1

_libc = ctypes.CDLL(None, use_errno=True)


def enter_own_namespaces() -> None:
    """Leave the machine's network, mounts and processes; children will be in a new pid namespace.

    Root needs no more. Other users become the owner of a user namespace, in which they keep their
    own user and group. So the job sees its true user.
    """
    try:
        if os.geteuid() != 0 or not _is_permitted(_OWN):
            user, group = os.geteuid(), os.getegid()
            _unshare(_NEW_USER | _OWN)
            Path("/proc/self/setgroups").write_text("deny")  # required before a group map
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        _mount("none", "/", "", _MOUNT_PRIVATE_TREE)  # our mounts stay in our namespace
    except OSError as error:
        raise UsageError(_why_not(error)) from None


def _is_permitted(flags: int) -> bool:
    """Unshare as root; return false for a root of a container that lacks the right."""
    try:
        _unshare(flags)
    except PermissionError:
        return False
    return True


# Each sysctl that closes user namespaces, with its value when closed and its value when open.
_CLOSED_BY = (
    ("kernel/unprivileged_userns_clone", "0", "1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("user/max_user_namespaces", "0", "10000"),
    ("user/max_net_namespaces", "0", "10000"),
    ("user/max_pid_namespaces", "0", "10000"),
    ("user/max_mnt_namespaces", "0", "10000"),
)


def _why_not(error: OSError) -> str:
    for name, closed, opened in _CLOSED_BY:
        with contextlib.suppress(OSError):
            if Path("/proc/sys", name).read_text().strip() == closed:
                sysctl = name.replace("/", ".")
                return (
                    f"the lab needs namespaces, which {sysctl}={closed} forbids here: "
                    f"ask for sysctl -w {sysctl}={opened}, or run as root"
                )
    return (
        f"the lab needs namespaces, which this machine or container forbids ({error.strerror}): "
        "ask for user.max_user_namespaces above 0 and no seccomp rule against unshare, or root"
    )


def new_network() -> int:
    """Make a network namespace and return its handle, an open file; stay in the present one."""
    here = network_here()
    try:
        _unshare(_NEW_NETWORK)
        return network_here()
    finally:
        _setns(here)
        os.close(here)


def network_here() -> int:
    """Return a handle of the network namespace of this thread."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def inside(network: int) -> Iterator[None]:
    """Work in another network namespace; sockets made there stay there."""
    before = network_here()
    try:
        _setns(network)
        yield
    finally:
        _setns(before)
        os.close(before)


def become_host(network: int, name: str) -> None:
    """Move this process, for good, into a host: its network, its name, its /sys."""
    _setns(network)
    _unshare(_NEW_HOSTNAME | _NEW_MOUNTS)
    _checked(_libc.sethostname(name.encode(), len(name)))
    with contextlib.suppress(PermissionError):  # a container that masks parts of /sys keeps it
        _mount("sysfs", "/sys", "sysfs", _MOUNT_HARMLESS)


def packet_socket() -> int:
    """Open a socket that can hear all packets of this network, for a command to inherit."""
    try:
        own = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    except PermissionError as error:
        raise PermissionError(error.errno, "capturing needs CAP_NET_RAW, also in a lab") from None
    own.set_inheritable(True)
    return own.detach()


def mount_own_proc() -> None:
    """Show /proc of the pid namespace that this process is the first of."""
    try:
        _mount("proc", "/proc", "proc", _MOUNT_HARMLESS)
    except OSError as error:
        raise UsageError(
            f"the lab cannot mount a /proc of its own here ({error.strerror}): "
            "a container must leave /proc unmasked (--security-opt systempaths=unconfined)"
        ) from None


def name_hosts(addresses: dict[str, str]) -> None:
    """Show an /etc/hosts with these names, in our mount namespace only."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for name, address in addresses.items():
        # A dual-stack server, like torch's store, sees its clients at the second address.
        lines += [f"{address} {name}", f"::ffff:{address} {name}"]
    # The file needs a file system of our own until it is bound to its place.
    _mount("tmpfs", "/tmp", "tmpfs", _MOUNT_HARMLESS)
    try:
        own = Path("/tmp/hosts")
        own.write_text("\n".join(lines) + "\n")
        with contextlib.suppress(FileNotFoundError):  # the image has no /etc/hosts
            _mount(str(own), "/etc/hosts", "", _MOUNT_BIND)
    finally:
        _checked(_libc.umount2(b"/tmp", 2))  # 2 is MNT_DETACH: the bound file stays


def mount_disk(place: str) -> None:
    """Put a disk of the lab's own on a folder: a file system in memory, that can be full."""
    _mount("tmpfs", place, "tmpfs", _MOUNT_HARMLESS, f"mode=0777,size={_DISK_BYTES}")


def set_disk(place: str, *, is_full: bool) -> None:
    """Leave the lab's disk no room, or give it its room back."""
    for _ in range(_MOST_TRIES):  # somebody may write between the two calls
        found = os.statvfs(place)
        used_bytes = (found.f_blocks - found.f_bfree) * found.f_frsize
        least_bytes = max(used_bytes, os.sysconf("SC_PAGE_SIZE"))  # a size of 0 is no limit
        options = f"size={least_bytes if is_full else _DISK_BYTES}"
        with contextlib.suppress(OSError):
            _mount("tmpfs", place, "tmpfs", _MOUNT_HARMLESS | _REMOUNT, options)
            return


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it dies."""
    _checked(_libc.prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL))


def _unshare(flags: int) -> None:
    _checked(_libc.unshare(flags))


def _setns(namespace: int) -> None:
    _checked(_libc.setns(namespace, 0))


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = options.encode() or None
    _checked(_libc.mount(source.encode(), target.encode(), kind.encode(), flags, words))


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number or errno.EIO))
