"""The critic that `learner.critic` asks for: a value model beside the policy, and what is made of its values."""

from typing import Literal

from common.config.optimizer import OptimizerConfig
from common.config.types import Fraction, Natural, NonNegative, PositiveFloat, Strict, Text

BY_LENGTH = "length"


class CriticOptimizerConfig(OptimizerConfig, frozen=True, kw_only=True):
    lr: PositiveFloat = 1e-5  # Highest learning rate of Adam. A critic's is often ten times its policy's.


class CriticConfig(Strict, frozen=True, kw_only=True):
    """A value model that trains beside the policy, on the same batches; docs/critic.md."""

    # Folder that the critic starts from: a model of the policy's shape, or a critic. Unset, it is model.path.
    path: Text | None = None
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    warmup_steps: Natural = 0  # First steps of the run, in which the critic alone trains.
    # Largest way that a value may go within a batch before it counts no more. It needs several updates.
    value_clip: PositiveFloat | None = None
    gamma: Fraction = 1.0  # Discount of a reward for every token, or turn, that it is away.
    # Lambda of the policy's advantages: 1 sums rewards, less trusts values more. `length` makes it follow from the
    # sample's length; docs/critic.md.
    lam: Fraction | Literal["length"] = 1.0
    lam_alpha: PositiveFloat = 0.05  # With lam: length, lambda is 1 - 1 / (lam_alpha x trained tokens).
    lam_values: Fraction = 1.0  # Lambda of the returns that the critic learns.
    level: Literal["token", "turn"] = "token"  # One step of an episode: each sampled token, or each turn.
    kl_coefficient: NonNegative = 0.0  # Weight of the divergence from the reference, taken from each token's reward.
    normalize: bool = True  # Gives the advantages of a batch the mean 0 and the deviation 1.
