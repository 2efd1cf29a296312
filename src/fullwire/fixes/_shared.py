"""The fixes of a job on several hosts travel through its own store, from rank 0 to the others.

Rank 0 writes them, with the number of a trial and its steps, into the store through which the ranks
find each other. Ranks that `fullwire run --follow` started read them there before they apply any.
Where hosts share files, their ranks record themselves into the same recording.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from fullwire.compression.method import ERROR_VARIABLE
from fullwire.fixes.fix import fix_kind
from fullwire.lab import TORCHRUN
from fullwire.recorder.inside import DIRECTORY_VARIABLE, TRIAL_VARIABLE, record_into

FIXES_VARIABLE = "FULLWIRE_FIXES"  # JSON: pairs of a key and a setting
NOTES_VARIABLE = "FULLWIRE_FIXES_INTO"  # a folder for notes
STEPS_VARIABLE = "FULLWIRE_STEPS"  # after so many of them the process ends
FOLLOW_VARIABLE = "FULLWIRE_FOLLOW"  # 1: take the fixes of rank 0's host
LIMIT_VARIABLE = "FULLWIRE_TRIAL_LIMIT"  # the seconds after which a rank elsewhere ends its trial
OVER = "over"  # in place of a trial's number: there will be no other
_TRAVEL = (FIXES_VARIABLE, STEPS_VARIABLE, ERROR_VARIABLE, TRIAL_VARIABLE, LIMIT_VARIABLE)
_FOLDERS = (NOTES_VARIABLE, DIRECTORY_VARIABLE)  # they travel if the other host sees them
_KEY, _ARRIVED = "fullwire/fixes", "fullwire/arrived"
_PATIENCE = timedelta(minutes=5)
_PARTING_S = 30.0
_LOOK_S = 0.05

Note = Callable[[Mapping[str, Any]], bool]


def share(note: Note, also: tuple[str, ...]) -> None:
    """Give this host's fixes to the ranks of other hosts, or take theirs, by the environment.

    `also` names other variables that travel.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, world, address, told = (os.environ.get(name) for name in names)
    if rank is None or world is None or address is None or not (told or "").isdecimal():
        return  # a launcher, or a script that knows its group by itself
    port = int(told or 0)
    if os.environ.get(FOLLOW_VARIABLE):
        _take(address, port, note, also)
    elif rank == "0" and world not in ("1", os.environ.get("LOCAL_WORLD_SIZE")):
        _give(also)
        note({"gave": os.environ.get(TRIAL_VARIABLE, "")})
    if os.environ.get(TRIAL_VARIABLE) == OVER:
        _part(address, port, int(rank), int(world))
        raise SystemExit


def is_torchrun() -> bool:
    """Say whether this process is torchrun: it may have the variables of a rank from around it."""
    program = next((word for word in sys.orig_argv[1:] if not word.startswith("-")), "")
    return os.path.basename(program) in TORCHRUN


def _give(also: tuple[str, ...]) -> None:
    """Write the fixes into the job's store: now if its launcher has it, else once the job has."""
    from torch.distributed import TCPStore

    told = {name: os.environ[name] for name in (*_TRAVEL, *also) if name in os.environ}
    if TRIAL_VARIABLE in told:
        told |= {name: os.environ[name] for name in _FOLDERS if name in os.environ}
    content = json.dumps(told)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        TCPStore(address, port, is_master=False, timeout=_PATIENCE).set(_KEY, content)
        return
    # The name in torch.distributed is a function of the same name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    make = rendezvous._create_c10d_store

    @functools.wraps(make)
    def made(address: str, port: int, rank: int, *args: Any, **kwargs: Any) -> Any:
        # Rank 0's store waits for all ranks, and ranks elsewhere wait for the fixes. So the fixes
        # come first. The store that is made next has the same server.
        first = TCPStore(
            address,
            port,
            is_master=rank == 0,
            timeout=_PATIENCE,
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=kwargs.get("use_libuv", True),
        )
        first.set(_KEY, content)
        return make(address, port, rank, *args, **kwargs)

    rendezvous._create_c10d_store = made


def _take(address: str, port: int, note: Note, also: tuple[str, ...]) -> None:
    """Wait for the fixes of rank 0's host, and let this process's environment have them."""
    from torch.distributed import TCPStore

    store = TCPStore(address, port, is_master=False, timeout=_PATIENCE)
    told = json.loads(store.get(_KEY))
    note({"took": told})
    pairs = json.loads(told.get(FIXES_VARIABLE, "[]"))
    for key, setting in pairs:  # they come from elsewhere, as a recipe does
        kind = fix_kind(key)
        os.environ.update(kind.environment(kind.checked_in_recipe(setting)))
    os.environ.update({name: told[name] for name in (*_TRAVEL, *also) if name in told})
    for name in _FOLDERS:
        if os.path.isdir(folder := told.get(name, "")):
            os.environ[name] = folder
            if name == DIRECTORY_VARIABLE:
                record_into(folder)
    if limit := told.get(LIMIT_VARIABLE):
        ending = threading.Timer(float(limit), os._exit, (124,))
        ending.daemon = True
        ending.start()


def _part(address: str, port: int, rank: int, world: int) -> None:
    """Let rank 0 go last: its host may have the store."""
    from torch.distributed.rendezvous import _create_c10d_store

    store = _create_c10d_store(address, port, rank, world, timedelta(seconds=_PARTING_S))
    end_s = time.monotonic() + _PARTING_S
    arrived = store.add(_ARRIVED, 1)
    while rank == 0 and arrived < world and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
        arrived = store.add(_ARRIVED, 0)
