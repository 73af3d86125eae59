"""A replay beside its original, step by step."""

import msgspec

from common.metrics import StepMetrics

COMPARED = ("loss", "grad_norm", "reward_mean")


class ReplayedStep(msgspec.Struct, frozen=True):
    """A step's figures then and now; `original` is None where the run has no line for the step, as after a crash."""

    step: int
    original: dict[str, float] | None
    replayed: dict[str, float]

    @property
    def equal(self) -> bool:
        """Bitwise, NaN included."""
        return self.original is not None and all(_same(self.original[n], x) for n, x in self.replayed.items())


class ReplayReport(msgspec.Struct, frozen=True):
    """OUT/replay.json."""

    run: str
    first: int
    last: int
    checkpoint: str | None
    overrides: list[str]
    steps: list[ReplayedStep]


def compare(original: StepMetrics | None, replayed: StepMetrics) -> ReplayedStep:
    """One step."""
    return ReplayedStep(replayed.step, None if original is None else _figures(original), _figures(replayed))


def line(step: ReplayedStep) -> str:
    """'step 12  loss 0.1234 =  grad_norm 1.5 -> 1.7 (+0.2)  ...'."""
    parts = [f"step {step.step:>5}"]
    for name, now in step.replayed.items():
        then = None if step.original is None else step.original[name]
        if then is None:
            parts.append(f"{name} {now:.6g} (the run has none)")
        elif _same(then, now):
            parts.append(f"{name} {now:.6g} =")
        else:
            parts.append(f"{name} {then:.6g} -> {now:.6g} ({now - then:+.2e})")
    return "  ".join(parts)


def summary(steps: list[ReplayedStep]) -> str:
    """One sentence."""
    known = [step for step in steps if step.original is not None]
    different = [step for step in known if not step.equal]
    if not known:
        return f"{len(steps)} steps replayed; the run has no metrics of them"
    if not different:
        return f"all {len(known)} steps equal the run's, bit for bit"
    first = different[0]
    return f"{len(known) - len(different)} of {len(known)} steps equal the run's; the first that differs: {line(first)}"


def _figures(metrics: StepMetrics) -> dict[str, float]:
    return {name: float(getattr(metrics, name)) for name in COMPARED}


def _same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)
