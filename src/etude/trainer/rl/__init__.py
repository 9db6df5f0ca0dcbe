"""The trainer process of a reinforcement-learning run.

    process, clock               the loop: groups in, a version out; what is durable when
    restore                      a version again, from a checkpoint and the steps since
    step, batch, loss, presets   one optimizer step: rows with `advantages`, the loss and its table of presets
    plan, execution              which forward passes a batch is computed in, and the passes
    policies, value, selfcheck   masks over tokens and episodes, the value head of ppo, a check of the gradients
    guards, figures, mismatch    what is measured of a step, and what is done when a figure is out of bounds
    probes, rescoring, memory    scores of fixed sequences, of recorded episodes, and the memory that a step took

Imports models, weights, ledger, and of rollout the audit of groups, drift and probes. Public: `process.main`,
`step.train_step`, and `loss.LossTokens` for losses of the user's.
"""
