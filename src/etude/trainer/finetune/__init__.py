"""The stages before reinforcement learning: mid-training, supervised fine-tuning, and fine-tuning on edits.

    pretrain, apply              the stages: `midtrain` and `sft`, and `finetune` on edits
    loop, packed, documents      the loop with its checkpoints, and its batches: packed rows, or documents
    data, folder                 rows from a user's files; model folders read and written
    routers, distillation        the balance of a sparse model's routers, and a teacher's part of the loss
    config                       the options of the stages

Imports corpus, edits and models. Public: `pretrain.midtrain`, `pretrain.sft`, `apply.finetune` and `config`.
"""
