"""The trainer process of a reinforcement-learning run.

    process, clock               the loop: groups in, a version out; the order of durable writes
    restore                      a version again, from a checkpoint and the steps since
    step, batch, loss, presets   one optimizer step: rows with `advantages`, the loss and its table of presets
    plan, execution              the choice of forward passes for a batch, and the passes
    trial, selfcheck             checks of a model's rows against transformers, and of the gradients
    policies, value, distill     masks over tokens and episodes, the value head of ppo, a teacher's judgement
    guards, figures, mismatch    figures of a step, and the reaction to figures out of bounds
    probe_scores                 scores of fixed sequences
    memory, memory_table         the memory of a step, measured and estimated

Imports models, weights, ledger, and of rollout the audit of groups, drift and probes. Public: `process.main`,
`step.train_step`, and `loss.LossTokens` for losses of the user's.
"""
