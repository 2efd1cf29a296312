"""The verdict where the job slows down its own computation, on processors or on a device."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.evidence.samples import CpuBusiest
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Colour, VerdictKind, register
from fullwire.run.placement import shares_one_host
from fullwire.timeline.account import Part

_OF_KERNELS = ("kernels", "the plan")  # which tell contention on devices
_ON_A_DEVICE = "kernels that take longer beside communication"
_WAITED = 0.05  # of the step: a rank that waits as long for a processor finds no room


class ComputationIsCrowded(Finding):
    """The time that the job's communication, and its other ranks on a host, cost computation."""

    template = (
        "The job slows down its own computation: communication and other ranks of the same "
        "host cost it {lost.share:.0%} of {lost.whole.named}."
    )

    lost: Amount


class KernelsAreSlowed(Finding):
    """The time by which kernels of a device take longer beside communication than alone."""

    template = (
        "The job slows down its own computation: kernels take longer beside communication than "
        "alone, which costs {lost.share:.0%} of {lost.whole.named}."
    )

    lost: Amount


class RanksShareProcessors(Finding):
    """The exposed time of collectives, where ranks share the processors of one host."""

    template = (
        "The ranks share the processors of one host: their collectives, and waiting for a "
        "processor, cost {lost.share:.0%} of {lost.whole.named}. {taken}"
    )

    lost: Amount
    taken: Finding


class ProcessorsAreTaken(Finding):
    """No processor has time left."""

    template = "The processors are taken: {share:.0%} used."

    share: float


class ProcessorsAreFree(Finding):
    """Processors have time left in the mean."""

    template = "The busiest processor was {share:.0%} used."

    share: float


class ProcessorsAreWaitedFor(Finding):
    """Processors have time left in the mean, but ranks wait for them: they need one at a time."""

    template = (
        "The busiest processor was {share:.0%} used, and a rank still waited {delay_s:time} of "
        "each step for a processor."
    )

    share: float
    delay_s: float


class ProcessorsNotSampled(Finding):
    """The run does not say how much of the processors was used."""

    template = "How much of the processors was used is not recorded."


@register
class Contention(VerdictKind):
    """Computation that the job itself slows down."""

    key = "contention"
    part = Part.CONTENTION.key
    label = "contention"
    colour = Colour("#c96f9b", "#d98bb2")
    lost_to = "ranks and communication that share processors"

    def loss_in(self, case: Case) -> str:
        """Return what is shared: processors, or a device whose kernels communication slows."""
        return _ON_A_DEVICE if case.account.crowding.source in _OF_KERNELS else self.lost_to

    def says(self, case: Case) -> Finding:
        """Return the time that shared processors, or a shared device, cost."""
        lost = case.of_step(case.account.parts_s[Part.CONTENTION.key])
        if case.account.crowding.source in _OF_KERNELS:
            return KernelsAreSlowed(lost=lost)
        if not shares_one_host(case.run):
            return ComputationIsCrowded(lost=lost)
        busiest = next(
            (evidence for evidence in case.evidence if isinstance(evidence, CpuBusiest)), None
        )
        if busiest is None:
            return RanksShareProcessors(lost=lost, taken=ProcessorsNotSampled())
        share = busiest.value
        delay_s = max((seconds for _, seconds in case.run.facts.run_delay_s or ()), default=0.0)
        taken: Finding = ProcessorsAreFree(share=share)
        if busiest.is_saturated:
            taken = ProcessorsAreTaken(share=share)
        elif delay_s >= _WAITED * case.step_s:
            taken = ProcessorsAreWaitedFor(share=share, delay_s=delay_s)
        return RanksShareProcessors(lost=lost, taken=taken)
