"""The stages before reinforcement learning: mid-training, supervised fine-tuning, and fine-tuning on edits.

    pretrain, applied_edits    the stages: `midtrain` and `sft`, and `finetune` on edits
    training_loop              the loop with its checkpoints
    packed, document_masks     the batches of the loop: packed rows, or prompts with documents
    data, reading, streamed    a user's rows: their sources, the process that reads them, the steps over them
    provenance                 which documents a step was trained on
    folder                     model folders read and written
    routers, distillation      the balance of a sparse model's routers, and a teacher's part of the loss
    config                     the options of the stages

Imports corpus, edits and models. Public: `pretrain.midtrain`, `pretrain.sft`, `applied_edits.finetune`, `config`,
`data` and `provenance`.
"""
