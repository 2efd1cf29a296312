"""A file that says which addresses are one host's, and which ranks run there.

# name  addresses                 ranks (optional)
node0   10.0.0.1 10.0.1.1         ranks=0-7
node1   10.0.0.2 10.0.1.2         ranks=8-15
"""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

from fullwire.errors import UsageError
from fullwire.files import opened
from fullwire.run.facts import Facts
from fullwire.units import shown

_MOST_BYTES = 2**26
_MOST_RANKS = 1_000_000


def read_hosts(path: Path) -> Facts:
    """Read a hosts file as the facts `addresses` and, where it has ranks, `hosts`."""
    with opened(path) as file:
        content = file.read(_MOST_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    owner: dict[str, str] = {}  # of each address
    addresses: dict[str, list[str]] = {}
    host_of_rank: dict[int, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place, name = f"{path}, line {number}", words[0]
        if name in addresses or "," in name or "=" in name:
            raise UsageError(f"{place}: expected a new host's name, got {shown(name)}")
        addresses[name], ranks = _of_host(words[1:], place)
        for rank in ranks:
            if host_of_rank.setdefault(rank, name) != name:
                raise UsageError(f"{place}: rank {rank} is on {host_of_rank[rank]} already")
    for name, own in addresses.items():
        if not own:
            raise UsageError(f"{path}: {name} has no address")
        for address in own:
            if owner.setdefault(address, name) != name:
                raise UsageError(f"{path}: {address} belongs to {owner[address]} and to {name}")
    if not owner:
        raise UsageError(f"{path}: expected lines like: node0 10.0.0.1 10.0.1.1 ranks=0-7")
    facts = Facts(addresses=",".join(f"{name}={'+'.join(own)}" for name, own in addresses.items()))
    if host_of_rank:
        if sorted(host_of_rank) != list(range(len(host_of_rank))):
            raise UsageError(
                f"{path}: expected ranks from 0 without holes, got {len(host_of_rank)}"
            )
        facts |= Facts(hosts=",".join(host_of_rank[rank] for rank in range(len(host_of_rank))))
    return facts


def _of_host(words: list[str], place: str) -> tuple[list[str], list[int]]:
    """Read the addresses and the ranks that a line gives its host."""
    addresses: list[str] = []
    ranks: list[int] = []
    for word in words:
        if word.startswith("ranks="):
            continue
        try:
            addresses.append(str(ip_address(word)))
        except ValueError:
            raise UsageError(f"{place}: expected an address, got {shown(word)}") from None
    for word in words:
        if not word.startswith("ranks="):
            continue
        first, _, last = word[6:].partition("-")
        of_word = range(0)
        if first.isdecimal() and (last or first).isdecimal():
            of_word = range(int(first), int(last or first) + 1)
        if not 0 < len(of_word) <= _MOST_RANKS:
            raise UsageError(f"{place}: expected ranks=0 or ranks=0-7, got {shown(word[6:])}")
        ranks += of_word
    return addresses, ranks
