"""What a learner is asked for. Apart from it, so that a wrong wish is refused before ray is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlfreeze_ds.errors import RLFreezeError

ALGORITHMS = ("PPO", "SAC", "APPO")


@dataclass(frozen=True)
class LearnerSettings:
    """
    Attributes:
        algorithm: one of :data:`ALGORITHMS`.
        train_batch: transitions of an update.
        seed: of weights and exploration; None draws one.
        num_env_runners: processes that roll out simulated jobs, whose transitions fill up what live jobs did not bring.
        num_learners: processes that compute the update; 0 computes it in the server's.
        policy_file: what the policy begins as; None begins at random.
    """

    algorithm: str = "PPO"
    train_batch: int = 256
    seed: int | None = None
    num_env_runners: int = 0
    num_learners: int = 0
    policy_file: Path | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise RLFreezeError(
                f"--algorithm {self.algorithm}: must be one of {', '.join(ALGORITHMS)}. RLlib's others expect environments "
                "that they step themselves."
            )
        if self.policy_file is not None and self.algorithm == "SAC":
            raise RLFreezeError("--policy-file: SAC's policy is built otherwise; begin with one under PPO or APPO.")
        for name, least in (("train_batch", 8), ("num_env_runners", 0), ("num_learners", 0)):
            if getattr(self, name) < least:
                option = "--" + name.replace("_", "-")
                raise RLFreezeError(f"{option} {getattr(self, name)}: must be at least {least}.")

    @property
    def num_cpus(self) -> int:
        """That Ray must have: one each, and one for the server itself."""
        return 1 + self.num_env_runners + self.num_learners
