"""PyTorch's own tests of torch.distributed, which come with torch, by Gloo and by ours in turn.

    python -m validation.torch_tests 4                  all of them, on four ranks
    python -m validation.torch_tests 8 all_gather DDP   those whose names hold one of these words

Some tests need exactly four ranks, others eight. The script forks each rank. torch itself knows
only of Gloo which tests are for a processor's backend. So the tests are chosen as Gloo's, and they
believe that they run on Gloo. The script names each failing test, with its error. It needs
expecttest, as torch's tests do: pip install expecttest.
"""

from __future__ import annotations

import os
import tempfile
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

from validation import arguments, results

_LONGEST_S = 60
_BACKENDS = ("gloo", "fullwire")
_MOST_SAID = 160


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one test on one backend."""

    kind: str  # passed, skipped, failed
    said: str = ""


def main() -> None:
    """Run the requested tests and print the differences."""
    taken = arguments.parser(__doc__)
    taken.add_argument("ranks", type=int)
    taken.add_argument("words", nargs="*", default=[""], metavar="word")
    given = taken.parse_args()
    ranks, words = given.ranks, given.words
    cases = _cases(ranks)
    counts: Counter[tuple[str, str]] = Counter()
    for name in unittest.TestLoader().getTestCaseNames(cases):
        if not any(word in name for word in words):
            continue
        gloo, ours = (_outcome(cases, name, backend) for backend in _BACKENDS)
        counts[gloo.kind, ours.kind] += 1
        if "failed" in (gloo.kind, ours.kind):
            print(f"{name}: Gloo {gloo.kind}, ours {ours.kind}", flush=True)
            for who, each in zip(_BACKENDS, (gloo, ours), strict=True):
                if each.said and each.kind == "failed":
                    print(f"    {who}: {each.said}", flush=True)
    for (gloo_kind, ours_kind), count in sorted(counts.items()):
        print(f"{count:4} {gloo_kind} with Gloo, {ours_kind} with ours")
    if words == [""]:
        passed = sum(count for (gloo_kind, _), count in counts.items() if gloo_kind == "passed")
        results.renew(
            "torch-tests",
            summary=f"{counts['passed', 'passed']} of the {passed} that Gloo passes, {ranks} ranks",
            cases=counts.total(),
            tables=[
                results.Table(
                    columns=["Gloo", "ours", "tests"],
                    rows=[[*kinds, count] for kinds, count in sorted(counts.items())],
                )
            ],
        )


def _cases(ranks: int) -> type[unittest.TestCase]:
    """Return torch's tests as those that torch runs on Gloo."""
    place = tempfile.mkdtemp(prefix="fullwire-")
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": place,
        "OMP_NUM_THREADS": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(_LONGEST_S),
        "INIT_METHOD": f"file://{place}/init",
    }
    from torch import multiprocessing
    from torch.testing._internal.distributed import distributed_test

    for profiled in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        # Tests of these backends expect profiler events that are named after Gloo.
        getattr(distributed_test, profiled).clear()

    class Cases(
        distributed_test.TestDistBackend,  # type: ignore[misc]  # torch may be absent when we check
        distributed_test.DistributedTest._DistTestBase,  # type: ignore[misc]
    ):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Cases


def _outcome(cases: type[unittest.TestCase], name: str, backend: str) -> Outcome:
    """Run one test, and discard the output of its ranks."""
    result = unittest.TestResult()
    with _instead_of_gloo(backend), _quiet():
        cases(name).run(result)
    if result.skipped:
        return Outcome("skipped", result.skipped[0][1])
    wrong = [text for _, text in (*result.failures, *result.errors)]
    return Outcome("failed", _last_line(wrong[0])) if wrong else Outcome("passed")


def _last_line(traceback: str) -> str:
    """Return the error of the first rank that failed."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line.split(":")[0] or "Exception" in line]
    return (told[-1] if told else lines[-1])[:_MOST_SAID]


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard the output of this process and of its forks."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        kept = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in kept:
            os.dup2(nowhere.fileno(), number)
        try:
            yield
        finally:
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)


@contextmanager
def _instead_of_gloo(backend: str) -> Iterator[None]:
    """Provide this backend under Gloo's name to code that requests Gloo."""
    import torch.distributed as dist

    def asking(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def ask(*args: Any, **kwargs: Any) -> Any:
            args = tuple(backend if each == "gloo" else each for each in args)
            if kwargs.get("backend") == "gloo":
                kwargs["backend"] = backend
            return original(*args, **kwargs)

        return ask

    def answering(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def answer(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            return "gloo" if found == backend else found

        return answer

    replaced = {"init_process_group": asking, "new_group": asking, "get_backend": answering}
    with ExitStack() as undone:
        for name, around in replaced.items():
            replacement = around(getattr(dist, name))
            for module in (dist, dist.distributed_c10d):
                undone.enter_context(mock.patch.object(module, name, replacement))
        yield


if __name__ == "__main__":
    main()
