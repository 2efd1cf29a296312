"""The words of an answer, each with its meaning: the same in the terminal, on the page and in JSON.

`fullwire explain --glossary` prints them, and `docs/reference/glossary.md` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap

_VERDICTS = "Verdicts"

_WORDS: Mapping[str, Mapping[str, str]] = {
    "The account of a step": {
        "step": "One pass over a batch, up to the update of the weights. Its time is that "
        "of the usual step.",
        "account": "The time of a step, divided into parts. The parts add up to the step.",
        "compute": "The device works on the batch. As a verdict: computation takes longer than on "
        "one worker.",
        "contention": "Computation takes longer because the job's own communication, and its other "
        "ranks on the host, use the same processors or device.",
        "exposed": "Communication that no computation hides: the rank waits for it.",
        "line rate": "Exposed time that the bytes need at the speed of the links. As a verdict: "
        "the links are full, and the job needs more bandwidth or fewer bytes.",
        "latency": "Exposed time that messages cost whatever their size: the number of operations "
        "times the time of a small message.",
        "transport": "Exposed time beyond line rate and latency. The library that sends, such as "
        "Gloo or NCCL, leaves the links idle for so long.",
        "straggler": "Ranks wait for the latest rank of a collective.",
        "bubble": "Stages of a pipeline wait for each other.",
        "codec": "Gradients are packed and unpacked, by a compressor or a communication hook.",
        "input": "The rank waits for its next batch.",
        "host": "The rest of a step: Python, logs, checkpoints, metrics.",
        "unexplained": "Exposed time that no rule can attribute. The notes name the missing data.",
    },
    _VERDICTS: {  # the kinds of verdict add their own
        "verdict": "The largest part of the account other than compute, if it is at least 10 % of "
        "the step.",
        "break-even": "The link speed or the number of workers at which the verdict changes.",
        "evidence": "Measurements of links, sockets and processors that support the verdict.",
    },
    "Predictions and fixes": {
        "T1": "The time of a step on one worker. --baseline measures it; otherwise it is estimated "
        "from the run.",
        "scaling factor": "Throughput of n workers, divided by n times the throughput of one. With "
        "equal work for each worker it is T1 divided by the step. 1 is ideal.",
        "network utilization": "Bits sent, divided by line rate times duration.",
        "interval": "The range in which nine of ten measurements should lie.",
        "fix": "One change to the job, with the step that it predicts.",
        "exact": "The risk of a fix that leaves results the same, up to the order of sums.",
        "numeric": "The risk of a fix that rounds gradients.",
        "semantic": "The risk of a fix that changes the training: another batch, or fewer sums.",
        "usual step": "The mean of the middle half of the steps by duration, after warm-up. Every "
        "command prints its time as the time of a step. A few long steps do not move it.",
        "measured transport": "A prediction with the speed that the collectives of the run show, "
        "instead of full links.",
    },
    "The job and its network": {
        "rank": "One process of a job. A worker is the same.",
        "run": "A recorded, imported or simulated job: a folder of tables.",
        "gap": "Data that a run lacks, such as a killed rank. Answers name it.",
        "collective": "An operation that all ranks take part in, such as an all-reduce: each rank "
        "gets the sum.",
        "bucket": "Gradients that are sent together, in one collective.",
        "hook": "A function of the script that packs gradients before they are sent.",
        "link": "The way from a host to the network, in one direction.",
        "payload": "Bytes without headers. Bytes on the wire include them.",
        "flow": "The packets from one address and port to another.",
        "iteration": "One round of the same transfers in captured packets: a step, seen from the "
        "network.",
    },
}


def glossary() -> Mapping[str, Mapping[str, str]]:
    """Return the words with their meanings, by subject."""
    from fullwire.findings.verdicts import verdict_kinds  # here: it loads numpy

    # By name: the order in which kinds register is that in which somebody imported them.
    kinds = {key: kind.meaning for key, kind in sorted(verdict_kinds().items()) if kind.meaning}
    return {**_WORDS, _VERDICTS: {**_WORDS[_VERDICTS], **kinds}}


def meanings() -> Mapping[str, str]:
    """Return the meaning of every word."""
    return {word: meaning for words in glossary().values() for word, meaning in words.items()}


def glossary_lines(columns: int) -> Iterator[str]:
    """Yield the lines of the glossary, as a terminal of some width shows it."""
    widest = max(map(len, meanings()))
    for subject, words in glossary().items():
        yield subject
        for word, meaning in words.items():
            first, *more = wrap(meaning, max(columns - widest - 4, 16))
            yield f"  {word:<{widest}}  {first}"
            yield from (f"{'':{widest + 4}}{line}" for line in more)
        yield ""
