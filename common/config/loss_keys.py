"""The keys of `learner.loss`. Bounds that apply when they are unset, and checks, are in common/config/loss.py."""

from typing import Annotated, Literal

from msgspec import Meta

from common.config.types import (
    AboveOne,
    AdvantageName,
    CorrectionName,
    KlEstimatorName,
    NonNegative,
    Number,
    ObjectiveName,
    Positive,
    PositiveFloat,
    ReductionName,
    Strict,
    Text,
)

DEFAULT_TOP_K = 20  # most that vLLM returns unless its max_logprobs is raised


class DistillationConfig(Strict, frozen=True, kw_only=True):
    """Learning from a teacher's log-probabilities of what the policy sampled; docs/distillation.md."""

    teacher: Text  # Name of one of `scorers`, of kind: teacher.
    # Divergence that is minimised. reverse_kl and advantage learn from sampled tokens, forward_kl from the teacher's
    # top_k tokens at every place.
    objective: Literal["reverse_kl", "forward_kl", "advantage"] = "reverse_kl"
    coefficient: PositiveFloat = 1.0  # Weight of the divergence from the teacher.
    top_k: Positive | None = None  # Tokens of the teacher at each place, for forward_kl. Unset, 20.
    alone: bool = False  # Trains on the teacher alone. Rewards are still measured.

    @property
    def wanted(self) -> int:
        """Tokens of the teacher that each place needs, besides the sampled one."""
        return (self.top_k or DEFAULT_TOP_K) if self.objective == "forward_kl" else 0


class LossConfig(Strict, frozen=True, kw_only=True):
    """Bounds that are None take their default from common/config/loss.py; see docs/algorithms.md."""

    # How the update of a token is bounded; docs/algorithms.md compares the objectives.
    objective: ObjectiveName = "ppo_clip"
    objective_options: dict[str, Number] = {}  # Keyword arguments of the objective; docs/algorithms.md.
    # How the rewards of a group become advantages; docs/algorithms.md compares the estimators.
    advantage: AdvantageName = "grpo"
    # Keyword arguments of the estimator: `k` of pass_at_k, names and weights of gdpo's rewards; docs/algorithms.md.
    advantage_options: dict[str, Number] = {}
    # Lower bound of the objective. Unset, its default applies. Under proximal: recompute it needs several updates.
    clip_low: PositiveFloat | None = None
    # Upper bound of the objective. Unset, its default applies. Under proximal: recompute it needs several updates.
    clip_high: PositiveFloat | None = None
    # Second bound of ppo_clip for negative advantages. Under proximal: recompute it needs several updates.
    clip_dual: AboveOne | None = None
    # Policy around which the update is bounded; docs/corrections.md.
    proximal: Literal["recompute", "behavior", "loglinear"] = "recompute"
    # Importance correction of tokens that an older version sampled; docs/corrections.md.
    correction: CorrectionName = "tis"
    # Ratio that the correction uses: the token's, the sample's, or its geometric mean.
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    correction_low: PositiveFloat | None = None  # Lower bound of the weight. Unset, the correction's default applies.
    correction_cap: PositiveFloat | None = None  # Upper bound of the weight. Unset, the correction's default applies.
    correction_normalize: bool = False  # Divides the weights by their mean over the batch.
    correction_veto: PositiveFloat | None = None  # A sample with a token whose weight is below this leaves the loss.
    # Weight of the KL divergence from the reference model; 0 loads no reference.
    kl_coefficient: NonNegative = 0.0
    kl_estimator: KlEstimatorName = "k3"  # Estimator of that divergence.
    reference: Text | None = None  # The reference model, named like model.path. Unset, it is model.path.
    entropy_coefficient: NonNegative = 0.0  # Weight of the entropy bonus.
    # Weight of the squared log-ratio to the sampler, which keeps tokens near the policy that sampled them.
    log_ratio_penalty: NonNegative = 0.0
    # How the loss of tokens is averaged; docs/algorithms.md.
    reduction: ReductionName = "token_mean"
    distillation: DistillationConfig | None = None  # Learns from a teacher as well; docs/distillation.md.
    # Leaves out the rest of a batch's updates once the policy is further, in nats per token, from the one that began
    # the batch. Set it to bound what several updates do.
    kl_stop: Annotated[float, Meta(gt=0, lt=10)] | None = None

    @property
    def trains_on_rewards(self) -> bool:
        return self.distillation is None or not self.distillation.alone
