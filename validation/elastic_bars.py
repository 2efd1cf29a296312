"""What elastic training costs without failures, with a new worker, and with unlike workers.

    python -m validation.elastic_bars

- Three workers train 2 MB of parameters in steps of 10 ms, with `fullwire.elastic` and with DDP on
  the same backend, in turns.
- In a lab of 1 Gbps hosts are killed, and new workers receive 500 MB of state while the others
  train. The stop is the longest step of the others meanwhile, less their usual one.
- Of two workers one takes twice as long for a sample. With `--balance` the step should take 2/3.
  The samples of a step take 24 ms with equal shares, or 96 ms. 9 ms do not depend on samples.
- 256 ranks lose one. Their state machines agree on the next membership over a network that delivers
  a message in 0.1 ms. What a rank computes takes as long as it takes here.
"""

from __future__ import annotations

import heapq
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from fullwire.resilience.membership import Entered, Member, Membership
from validation import arguments, results
from validation.elastic_recovery import JOB, Notes, Step

STEPS = 1500
COST_BAR, STOP_BAR_S, BALANCE_BAR, FORMING_BAR_S = 1.01, 0.3, 1.1, 1.0
UNEVEN = {"uneven": 24, "uneven-slow": 96}  # ms of the slow worker's samples with equal shares
IDEAL = 2 / 3  # of the step with equal shares, where speeds are 2:1
RANKS, DELIVERY_S, LIMIT_NS, PAUSE_NS = 256, 1e-4, 60_000_000_000, 10_000_000
FULLWIRE = [sys.executable, "-m", "fullwire"]


def run(kind: str, *options: str, steps: int = STEPS, lab: Iterable[str] = ()) -> tuple[Notes, str]:
    """Run a job to its end; return its notes, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        job = [sys.executable, str(JOB), folder, str(steps), kind]
        command = ["lab", "run", *lab] if lab else ["run", *options]
        said = subprocess.run(
            [*FULLWIRE, *command, "--", *job], check=True, stdout=subprocess.PIPE, text=True
        )
        notes = Notes(Path(folder))
        notes.look()
    return notes, said.stdout


def median_s(said: str) -> float:
    """Return the median step that a job printed."""
    return float(said.split("median ")[1].split()[0])


def cost(pairs: int) -> list[float]:
    """Return the ratios of the step with `fullwire.elastic` to that of DDP."""
    ratios = []
    for number in range(pairs):
        kinds = ["elastic", "ddp"][:: 1 if number % 2 else -1]
        took_s = {kind: median_s(run(kind, "--workers", "3")[1]) for kind in kinds}
        ratios.append(took_s["elastic"] / took_s["ddp"])
        print(f"cost {ratios[-1]:.4f}", flush=True)
    return ratios


def stops(seed: int) -> list[float]:
    """Return how long the others stop for each new worker of a job whose hosts are killed."""
    lab = ["--workers", "3", "--rate", "1Gbps", "--no-probe", "--chaos", "kill every 30s"]
    notes, _ = run("large", lab=[*lab, "--seed", str(seed)], steps=2000)
    found = []
    for steps in notes.steps.values():
        for alone, together in zip(*_joins(steps), strict=True):
            # From a second after the loss, which the others have then survived.
            begin = next((n for n, s in enumerate(alone) if s.at_s > alone[0].at_s + 1), None)
            if begin is None:
                continue
            times = [step.at_s for step in [*alone[begin:], *together[:20]]]
            lasted_s = [after - before for before, after in itertools.pairwise(times)]
            found.append(max(lasted_s) - median(lasted_s))
            print(f"stop {found[-1]:.3f} s", flush=True)
    return found


def _joins(steps: list[Step]) -> tuple[list[list[Step]], list[list[Step]]]:
    """Return the steps of two before a third came, and those of three after it."""
    groups = [list(group) for _, group in itertools.groupby(steps, key=lambda step: step.size)]
    pairs = [
        (before, after)
        for before, after in itertools.pairwise(groups)
        if before[0].size == 2 and after[0].size == 3
    ]
    return [before for before, _ in pairs], [after for _, after in pairs]


def balanced(kind: str) -> tuple[float, float]:
    """Return the step with equal shares, and the one with shares by speed."""
    took_s = []
    for options in ((), ("--balance",)):
        notes, _ = run(kind, "--workers", "2", *options, steps=400)
        times = [step.at_s for step in next(iter(notes.steps.values()))][200:]
        took_s.append(median(after - before for before, after in itertools.pairwise(times)))
    return took_s[0], took_s[1]


def forming_s(victim: int) -> float:
    """Return the time from the loss of a rank until all others have the next membership."""
    first = Membership(0, tuple(range(RANKS)), 10)
    members = {
        rank: Member(rank, first, limit_ns=LIMIT_NS, pause_ns=PAUSE_NS)
        for rank in range(RANKS)
        if rank != victim
    }
    order = itertools.count()
    waiting: list[tuple[float, int, int, int, bytes]] = [
        (DELIVERY_S, next(order), rank, victim, b"") for rank in members
    ]
    free_s, entered_s = dict.fromkeys(members, 0.0), dict[int, float]()
    while waiting and len(entered_s) < len(members):
        at_s, _, rank, sender, data = heapq.heappop(waiting)
        member, begin_s = members[rank], max(at_s, free_s[rank])
        began = time.perf_counter()
        now_ns = int(begin_s * 1e9)
        sent = (
            member.receive(sender, data, now_ns)
            if data
            else member.lost(sender, now_ns, is_certain=True)
        )
        free_s[rank] = begin_s + time.perf_counter() - began
        for peer, message in sent:
            if peer != victim:
                heapq.heappush(
                    waiting, (free_s[rank] + DELIVERY_S, next(order), peer, rank, message)
                )
        if any(isinstance(event, Entered) for event in member.events):
            entered_s.setdefault(rank, free_s[rank])
        member.events.clear()
    if len(entered_s) < len(members):
        sys.exit(f"{len(members) - len(entered_s)} ranks have no next membership")
    return max(entered_s.values())


def main() -> None:
    """Measure all four, and write the results."""
    given = arguments.parser(__doc__)
    given.add_argument("--pairs", type=int, default=5)
    given.add_argument("--seeds", type=int, default=2)
    asked = given.parse_args()
    formed_s = [forming_s(victim) for victim in (0, 1, 100, RANKS - 1)]
    print(f"formed {max(formed_s):.3f} s", flush=True)
    balances = {}
    for kind, samples_ms in UNEVEN.items():
        equal_s, shared_s = balanced(kind)
        balances[samples_ms] = shared_s / (IDEAL * equal_s)
        print(f"{kind} {equal_s:.4f} {shared_s:.4f}", flush=True)
    ratios = cost(asked.pairs)
    stopped_s = [each for seed in range(asked.seeds) for each in stops(seed)]
    rows: list[list[results.Cell]] = [
        [
            "a step without failures, of DDP's on the same backend",
            f"{median(ratios):.3f} (median of {len(ratios)} pairs)",
            f"{COST_BAR}",
        ],
        [
            "stop of the others while a new worker receives 500 MB at 1 Gbps",
            f"{max(stopped_s):.2f} s (worst of {len(stopped_s)}), "
            f"{median(stopped_s):.2f} s (median)",
            f"{STOP_BAR_S} s",
        ],
        [
            f"{RANKS} ranks agree without a lost one (state machines, simulated network)",
            f"{max(formed_s):.2f} s (worst of {len(formed_s)})",
            f"{FORMING_BAR_S} s",
        ],
    ]
    what = "step of two workers of speed 2:1 with --balance, of the ideal one; samples of"
    for samples_ms, ratio in balances.items():
        rows.insert(-1, [f"{what} {samples_ms} ms", f"{ratio:.3f}", f"{BALANCE_BAR}"])
    kept = [
        median(ratios) <= COST_BAR,
        max(stopped_s) <= STOP_BAR_S,
        *(ratio <= BALANCE_BAR for ratio in balances.values()),
        max(formed_s) <= FORMING_BAR_S,
    ]
    results.write(
        "elastic-bars",
        claim="Elastic training costs little without failures, and new workers hardly stop others.",
        anchor="DDP on the same backend, and the ideal share of unlike workers",
        summary=f"{sum(kept)} of {len(kept)} bars kept",
        cases=len(ratios) + len(stopped_s) + len(balances) + len(formed_s),
        tables=[results.Table(columns=["figure", "measured", "bar"], rows=rows)],
    )


if __name__ == "__main__":
    main()
