"""slipstream plan CONFIG: what a job or a warm start would be, and every check that its launch would do.

It needs neither a GPU nor torch, Megatron or vLLM. The model's config.json is enough, without the weights.
"""

import argparse
import json
from typing import Any

import msgspec

from common.errors import EXIT_DONE, EXIT_USAGE
from launch.plan.page import show
from launch.plan.review import Review, make_review


def command(args: argparse.Namespace) -> int:
    """Print the plan; exit code 2 when a check fails."""
    review = make_review(args.config, args.overrides, args.gpus_per_node)
    if args.json:
        print(json.dumps(as_json(review)))
    else:
        show(review)
    return EXIT_USAGE if review.failed else EXIT_DONE


def as_json(review: Review) -> dict[str, Any]:
    """Everything on the page and more (the members of every group); the keys are relied on by other programs."""
    plan: Any = None
    if review.plan is not None:
        plan = msgspec.to_builtins(review.plan)
        for stage, made in zip(plan["stages"], review.plan.stages, strict=True):
            stage["peak"] = made.peak
    return {
        "config": review.file,
        "ok": not review.failed,
        "failed": review.failed,
        "before_launch": review.before_launch,
        "remarks": review.remarks,
        "plan": plan,
    }
