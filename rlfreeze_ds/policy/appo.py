"""RLlib's APPO for transitions that come from jobs: its loss, target network and V-trace, without the threads that feed it.

APPO is asynchronous so that actors need not wait for its learner. Ours never do: jobs are answered while the learner works, by
the policy of the update before, and V-trace corrects for that.
"""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPO
from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.learner import Learner

NEVER_DRAWN = 80.0
"""Log-likelihood under the behaviour policy that leaves a step no weight: exp(-80) of any other policy's, and no overflow."""


class InStepLearner(APPOTorchLearner):
    """APPO's learner that updates in the call, as PPO's does.

    RLlib's own hands batches to a thread: should that die, whoever waits for the update waits for ever, and with its circular
    buffer it looks for batches ten thousand times a second, in the process that answers. That thread starts here too, but nothing
    is ever put into its queue.
    """

    update = Learner.update

    def compute_loss_for_module(
        self, *, module_id: str, config: AlgorithmConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> torch.Tensor:
        """RLlib's, with the step that it appends to each trajectory out of V-trace.

        That step is there for the value of the last observation, V. RLlib gives it a discount of 0 but leaves its importance
        weight near 1, and so corrects its value to V + (0 - V): trajectories would end as if nothing came after them. Without
        weight its value stays V.
        """
        drawn = batch[Columns.LOSS_MASK].bool()
        batch = {**batch, Columns.ACTION_LOGP: batch[Columns.ACTION_LOGP].masked_fill(~drawn, NEVER_DRAWN)}
        return super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)


class InStepAPPO(APPO):
    """APPO whose training step samples, updates and hands on the weights in this order, as PPO's."""

    training_step = PPO.training_step
