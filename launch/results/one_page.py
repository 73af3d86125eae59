"""The first page of `slipstream report` of one job, as text to paste: did it learn, at what cost, what to change.

A verdict compares the means of the first 5 and the last 10 steps. A difference below two standard errors is noise.
The best of many windows is high by chance, so a fall from it must be beyond more of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np

from common.config.loss import OVER_THE_BATCH, is_plugin
from common.config.schema import Config
from common.metrics import OptFloat, StepMetrics, judged
from common.run_reader import LATEST, MetricsTail, known, mean
from common.waste import WASTE_REASONS
from launch.observe.advisor import advice_for
from launch.observe.job_view import duration, sparkline
from launch.observe.observation import given_up

Steps = MetricsTail[StepMetrics]
Rows = list[tuple[str, str]]
FIRST, LAST, ERRORS = 5, 10, 2.0  # steps, steps, standard errors
WIDTH = 48
# Parts of step_s, and the sign of each in the bar.
PARTS: dict[str, tuple[str, Callable[[StepMetrics], OptFloat]]] = {
    "training": ("█", lambda line: line.train_s),
    "waiting for groups": ("░", lambda line: line.learner_idle_s),
    "batches": ("▒", lambda line: line.batch_s),
    "snapshots": ("▓", lambda line: line.snapshot_s),
    "checkpoints": ("▚", lambda line: line.checkpoint_s),
}
OTHER = "·"
# Shares above which, and for the effective sample size below which, a key is named.
TRUNCATED, EQUAL, EFFECTIVE, EXPIRED, FAILED, CHECKPOINTS = 0.1, 0.5, 0.5, 0.05, 0.05, 0.1


def series(tail: Steps, name: str) -> list[float]:
    """The values of a metric over the steps in which it means something: a step that trained nothing has no ratios."""
    return known(judged(line, name) for line in tail.lines)


def rewards_of(tail: Steps) -> list[float]:
    """Mean rewards of the steps that have one; if the samples of all steps failed, those zeros."""
    return series(tail, "reward_mean") or tail.series(lambda line: line.reward_mean)


def trend(rewards: Sequence[float]) -> str:
    """short (too few steps), rose, fell (below its first steps, or from the best ten before the last), or flat."""
    if len(rewards) < FIRST + LAST:
        return "short"
    first, last = np.array(rewards[:FIRST]), np.array(rewards[-LAST:])
    before = [np.array(rewards[end - LAST : end]) for end in range(len(rewards) - LAST, LAST - 1, -LAST)]
    best = max(before, key=np.mean, default=last)

    def beyond(a: np.ndarray, b: np.ndarray, errors: float = ERRORS) -> bool:
        return bool(b.mean() - a.mean() > errors * math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b)))

    # Bonferroni: all windows together exceed it by chance as rarely as one exceeds ERRORS.
    errors = -NormalDist().inv_cdf(NormalDist().cdf(-ERRORS) / max(1, len(before)))
    risen_and_fallen = beyond(first, best, errors) and beyond(last, best, errors)
    if beyond(last, first) or (risen_and_fallen and best.mean() - last.mean() > (best.mean() - first.mean()) / 2):
        return "fell"
    return "rose" if beyond(first, last) else "flat"


def page_rows(summary: Mapping[str, Mapping[str, Any]], tail: Steps, config: Config | None) -> Rows:
    """(label, text) of each line; `summary` is launch.results.report.summarise of the same steps."""
    rewards = rewards_of(tail)
    rows = [("verdict", verdict(summary, tail, config))]
    rows.append(("reward", f"{min(rewards):.3f} {sparkline(rewards, WIDTH)} {max(rewards):.3f} in a step"))
    rows += held_out(summary, tail)
    stale = summary["staleness"]
    allowed = "" if stale["allowed"] is None else f" of {stale['allowed']} allowed"
    rows.append(("staleness", f"mean {stale['mean'] or 0.0:.2f}, largest {stale['max']:.0f}{allowed}, in versions"))
    rows += where_time_went(tail)
    for label, texts in (("wasted", wasted(summary, tail)), ("change", changes(tail, config) if config else [])):
        rows += [(label if n == 0 else "", text) for n, text in enumerate(texts)]
    return rows


def text_of(name: str, rows: Rows) -> str:
    return "\n".join([name, *(f"  {label:<11}{text}" for label, text in rows)])


def verdict(summary: Mapping[str, Mapping[str, Any]], tail: Steps, config: Config | None) -> str:
    first, last = summary["reward"]["first_5_steps"], summary["reward"]["last_10_steps"]
    rewards = rewards_of(tail)
    sentence = {
        "short": f"too few steps to tell: reward {first:.3f} (first 5 steps), {last:.3f} (last 10)",
        "rose": f"it learned: reward {first:.3f} (first 5 steps) to {last:.3f} (last 10)",
        "flat": f"it did not learn: reward {first:.3f} (first 5 steps) to {last:.3f} (last 10) is within the noise",
        "fell": f"it got worse: reward {first:.3f} (first 5 steps), best step {max(rewards):.3f}, {last:.3f} (last 10)",
    }[trend(rewards)]
    run, steps = summary["run"], tail.lines[-1].policy_version or len(tail.lines)
    of = f" of {config.run.steps}" if config else ""
    took = f" in {duration(run['seconds'])}" if run["seconds"] else ""
    return f"{sentence}; {steps}{of} steps{took}"


def held_out(summary: Mapping[str, Mapping[str, Any]], tail: Steps) -> Rows:
    """The curve of each dataset's evaluations, and what `slipstream eval` measured."""
    rows: Rows = []
    for dataset in dict.fromkeys(line.dataset for line in tail.evaluations):
        found = [line for line in tail.evaluations if line.dataset == dataset and not math.isnan(line.mean_reward)]
        if found:
            end = found[-1]
            low, high = end.mean_reward_low, end.mean_reward_high
            within = f" (95 %: {low:.3f} to {high:.3f})" if low is not None and high is not None else ""
            values = [line.mean_reward for line in found]
            curve = f"{values[0]:.3f} {sparkline(values, WIDTH)} {values[-1]:.3f}{within}"
            rows.append(("held out", f"{curve} on {end.problems} problems of {dataset}, version {end.policy_version}"))
    if measured := summary.get("held_out"):
        accuracies = [f"{measured[k]:.3f} {k.partition('_')[0]}" for k in measured if k.endswith("_accuracy")]
        rows.append(("held out", f"{', '.join(accuracies)} accuracy on {measured.get('problems', '?')} problems"))
    return rows or [("held out", "not measured; `slipstream eval RUN`, or evaluation.datasets and evaluation.every")]


def shares(tail: Steps) -> dict[str, float]:
    """Each part of the steps' time as a share, with `other`; {} where no line has the time of a step."""
    whole = sum(tail.series(lambda line: line.step_s))
    if not whole > 0:
        return {}
    found = {name: sum(tail.series(part)) / whole for name, (_, part) in PARTS.items()}
    return {**found, "other": max(0.0, 1 - sum(found.values()))}


def where_time_went(tail: Steps) -> Rows:
    found = {name: share for name, share in shares(tail).items() if share >= 0.005}
    if not found:
        return []
    signs = {name: sign for name, (sign, _) in PARTS.items()}
    edges = np.rint(np.cumsum([0.0, *found.values()]) * WIDTH / sum(found.values())).astype(int)
    bar = "".join(signs.get(name, OTHER) * int(n) for name, n in zip(found, np.diff(edges), strict=True))
    legend = "  ".join(f"{signs.get(name, OTHER)} {name} {share:.0%}" for name, share in found.items())
    mean_s = tail.mean(lambda line: line.step_s) or 0.0
    return [("time", f"{bar} {duration(mean_s)} a step"), ("", legend)]


def wasted(summary: Mapping[str, Mapping[str, Any]], tail: Steps) -> Iterator[str]:
    """Tokens by reason, groups and samples that trained nothing, and nodes without work."""
    tokens, by_reason = summary["tokens"], summary["wasted"]
    share = f" ({tokens['wasted'] / tokens['generated']:.1%})" if tokens["generated"] and tokens["wasted"] else ""
    lost = {reason: by_reason.get(f"tokens_{reason}") for reason in WASTE_REASONS}
    reasons = ", ".join(f"{count:,.0f} {reason}" for reason, count in lost.items() if count)
    generated = f"{tokens['wasted']:,} of {tokens['generated']:,} generated tokens{share}"
    yield f"{generated}{reasons and ': '}{reasons}"
    filtered, again = (sum(tail.series(m)) for m in (lambda x: x.groups_filtered, lambda x: x.groups_regenerated))
    counts = {"groups filtered, without signal": filtered, "groups given back": again}
    counts |= {"tokens expired": summary["staleness"]["tokens_expired"]}
    counts |= {f"samples failed ({reason})": count for reason, count in summary["failed_samples"].items()}
    if any(counts.values()):
        yield ", ".join(f"{count:,.0f} {what}" for what, count in counts.items() if count)
    if lost := given_up(summary["run"].get("tasks_given_up", 0)):
        yield lost
    nodes = tail.mean(lambda line: line.nodes_live)
    # between lines of one learner: the total began with the store, and grows while no learner is there
    pairs = [(a, b) for a, b in pairwise(tail.lines) if a.incarnation == b.incarnation]
    seconds = sum(known(b.step_s for _, b in pairs))
    waited = sum((b.seconds_wasted_waiting or 0.0) - (a.seconds_wasted_waiting or 0.0) for a, b in pairs)
    if nodes and seconds > 0 and (idle := waited / nodes / seconds) >= 0.01:
        yield f"nodes had no work {min(1.0, idle):.0%} of their time"


def changes(tail: Steps, config: Config) -> list[str]:
    """'KEY: what to do; EVIDENCE' by the newest steps, and the advisor's line on nodes and window."""
    newest, last = partial(tail.mean, steps=LATEST), tail.lines
    way = trend(rewards_of(tail))
    cut, effective = (mean(series(tail, x)[LATEST]) for x in ("truncated_fraction", "effective_sample_fraction"))
    cut, equal = cut or 0.0, newest(lambda line: line.advantage_zero_fraction) or 0.0
    expired, trained = (sum(getattr(line, f"tokens_{kind}") for line in last) for kind in ("expired", "trained"))
    failed, samples = (sum(tail.series(metric)) for metric in (lambda x: x.samples_failed, lambda x: x.samples))
    saving = shares(tail).get("checkpoints", 0.0)
    stale, learner, longest = config.staleness.max, config.learner, config.rollout.max_tokens
    estimators = {job.learner.loss.advantage for job in config.sources.values()}
    compared = learner.value_model is None and not newest(lambda line: line.teacher_s)
    compared &= not any(name in OVER_THE_BATCH or is_plugin(name) for name in estimators)  # equal groups may teach
    compared &= way == "rose" or not learner.dynamic_sampling
    other = "tasks.dataset: harder problems" if way == "rose" else "learner.dynamic_sampling: true, or easier problems"
    rules = [
        (way == "fell", f"learner.optimizer.lr: less than {learner.optimizer.lr:g}; the reward fell from its best"),
        (cut > TRUNCATED, f"rollout.max_tokens: more than {longest}; {cut:.0%} of samples are cut at a limit"),
        (compared and equal > EQUAL, f"{other}; {equal:.0%} of groups have equal rewards and teach nothing"),
        (expired > EXPIRED * (expired + trained), f"staleness.max: more than {stale}; {expired:,} tokens were too old"),
        (stale and effective is not None and effective < EFFECTIVE,
         f"staleness.max: less than {stale}; the effective sample size is {effective or 0:.0%} of the tokens"),
        (failed > FAILED * samples > 0,
         f"tasks: {failed / max(samples, 1):.0%} of samples failed; `slipstream transcripts RUN --worst` shows them"),
        (saving > CHECKPOINTS,
         f"learner.checkpoint.every: more than {learner.checkpoint.every}; checkpoints take {saving:.0%} of the time"),
    ]  # fmt: skip
    found = [text for applies, text in rules if applies]
    if advice := advice_for(last, stale):
        key = {"none": "rollout.nodes fits: ", "larger_window": ""}  # its text names the key
        found.append(f"{key.get(advice.change, 'rollout.nodes: ')}{advice.text}")
    return found or ["nothing that the rules know"]
